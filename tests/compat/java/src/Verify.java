import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.File;
import java.io.PrintWriter;
import java.io.RandomAccessFile;
import java.io.StringWriter;
import java.lang.reflect.Constructor;
import java.lang.reflect.Method;
import java.nio.ByteBuffer;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.ConcurrentMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MQVersion;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.MessageArrivingListener;
import org.apache.rocketmq.store.MessageStore;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/**
 * Opens stores with the real classes (recovery included: it changes the directory) and says all they see.
 *
 * A line of stdin: {"id", "store", "conf": {k: v}, "times": n, "keys": n}. The line of stdout for it, when it is done:
 * {"event": "verified", "id", "recovered": {...}, "queues": [...], "messages": [...], "times": [...], "keys": [...]},
 * or {"event": "failed", "id", "why"}. Several stores are open at a time: most of it is waiting for their threads.
 */
final class Verify {
    private static final int STORES_AT_A_TIME = 6;
    private static final long DISPATCH_MS = 30000;             // a store that is not dispatched by then never will be

    private final File dir;
    private final JsonObject options;
    private final List<Object> queues = new ArrayList<>();
    private final List<Object> messages = new ArrayList<>();
    private final List<Object> times = new ArrayList<>();
    private final Map<String, String[]> keys = new LinkedHashMap<>();

    private Verify(JsonObject options) {
        this.dir = new File(options.get("store").getAsString()).getAbsoluteFile();
        this.options = options;
    }

    static void run() throws Exception {
        ExecutorService threads = Executors.newFixedThreadPool(STORES_AT_A_TIME);
        for (String line; (line = Harness.STDIN.readLine()) != null; ) {
            JsonObject request = JsonParser.parseString(line).getAsJsonObject();
            threads.execute(() -> {
                try {
                    Harness.emit(new Verify(request).report());
                } catch (Throwable e) {
                    StringWriter why = new StringWriter();
                    e.printStackTrace(new PrintWriter(why));
                    Harness.emit(Harness.fields("event", "failed", "id", request.get("id"), "store", request.get("store"),
                        "why", why.toString()));
                }
            });
        }
        threads.shutdown();
        threads.awaitTermination(1, TimeUnit.HOURS);
    }

    private Map<String, Object> report() throws Exception {
        Properties conf = new Properties();
        for (Map.Entry<String, JsonElement> e : options.getAsJsonObject("conf").entrySet()) {
            conf.setProperty(e.getKey(), e.getValue().getAsString());
        }
        if (MQVersion.CURRENT_VERSION < MQVersion.Version.V5_0_0.ordinal()) {
            conf.putIfAbsent("brokerRole", "SLAVE");           // the 4.9.x store would deliver delayed messages by itself
        }
        boolean abort = new File(dir, "abort").exists();
        long[] walked = walk(dir);
        Map<String, Long> filesBefore = files(dir);
        long begin = System.currentTimeMillis();
        DefaultMessageStore store = open(dir, conf);
        if (!store.load()) {
            store.shutdown();
            throw new IllegalStateException("load() said no: see the logs under home");
        }
        long maxAfterLoad = store.getMaxPhyOffset();
        store.start();
        while (store.dispatchBehindBytes() > 0 && System.currentTimeMillis() < begin + DISPATCH_MS) {
            Thread.sleep(5);
        }
        Map<String, Object> report = Harness.fields("event", "verified", "id", options.get("id"));
        report.put("recovered", Harness.fields("abortFile", abort, "loadMs", System.currentTimeMillis() - begin,
            "minPhyOffset", store.getMinPhyOffset(), "maxPhyOffset", store.getMaxPhyOffset(),
            "behindBytes", store.dispatchBehindBytes(), "recordsOnDisk", walked[0], "endOnDisk", walked[1],
            "truncated", walked[1] - maxAfterLoad, "filesBefore", filesBefore, "filesAfter", files(dir)));
        for (Map.Entry<String, TreeSet<Integer>> topic : topics(dir).entrySet()) {
            for (int queueId : topic.getValue()) {
                queue(store, topic.getKey(), queueId);
            }
        }
        report.put("queues", queues);
        report.put("messages", messages);
        report.put("times", times);
        report.put("keys", look(store));
        store.shutdown();
        report.put("abortFileAfter", new File(dir, "abort").exists());
        return report;
    }

    private void queue(MessageStore store, String topic, int queueId) throws Exception {
        long min = store.getMinOffsetInQueue(topic, queueId);
        long max = store.getMaxOffsetInQueue(topic, queueId);
        long offset = min;
        long count = 0;
        long undecodable = 0;
        List<Long> stamps = new ArrayList<>();
        Map<String, Integer> statuses = new TreeMap<>();
        while (offset < max) {
            GetMessageResult result = store.getMessage("compat_verify", topic, queueId, offset, 32, null);
            statuses.merge(result.getStatus().name(), 1, Integer::sum);
            if (result.getStatus() == GetMessageStatus.FOUND) {
                for (SelectMappedBufferResult mapped : result.getMessageMapedList()) {
                    MessageExt message = message(mapped.getByteBuffer());
                    if (message == null) {                     // a unit that speaks of no record
                        undecodable++;
                    } else {
                        stamps.add(message.getStoreTimestamp());
                        count++;
                    }
                }
            }
            long next = result.getNextBeginOffset();
            result.release();
            if (next <= offset) {
                break;
            }
            offset = next;
        }
        queues.add(Harness.fields("topic", topic, "queueId", queueId, "min", min, "max", max, "messages", count,
            "undecodable", undecodable, "statuses", statuses,
            "earliestStoreTime", store.getEarliestMessageTime(topic, queueId)));
        if (Harness.number(options, "times", 0) > 0 && !stamps.isEmpty()) {
            times(store, topic, queueId, stamps);
        }
    }

    /** Decode a record and note it, with its keys; an inner batch is one line with its messages in it. */
    private MessageExt message(ByteBuffer raw) throws Exception {
        MessageExt message = raw.remaining() < 40 ? null : MessageDecoder.decode(raw.slice(), true, true);
        if (message == null) {
            return null;
        }
        int sysFlag = raw.getInt(36);
        Map<String, Object> line = Messages.seen(message, false);
        line.put("storedSysFlag", sysFlag);                    // decoding clears the compressed bit
        note(message);
        if ((sysFlag & 0xC0) == 0xC0) {
            List<Object> inner = new ArrayList<>();
            for (MessageExt one : unwrap(message)) {
                inner.add(Messages.seen(one, false));
            }
            line.put("inner", inner);
        }
        messages.add(line);
        return message;
    }

    private void note(MessageExt message) {
        List<String> all = new ArrayList<>();
        all.add(message.getProperty("UNIQ_KEY"));
        if (message.getKeys() != null) {
            all.addAll(Arrays.asList(message.getKeys().split(" ")));
        }
        for (String key : all) {
            if (key != null && !key.isEmpty()) {
                keys.put(message.getTopic() + "#" + key, new String[] {message.getTopic(), key});
            }
        }
    }

    /** Of the keys that occur as many as wanted, and where the store's index says messages with them are. */
    private List<Object> look(MessageStore store) throws Exception {
        List<Object> answers = new ArrayList<>();
        List<String[]> all = new ArrayList<>(keys.values());
        int wanted = (int) Math.min(Harness.number(options, "keys", 0), all.size());
        for (int i = 0; i < wanted; i++) {
            String[] key = all.get((int) ((long) i * all.size() / wanted));
            List<Object> ranges = new ArrayList<>();
            if (options.has("ranges")) {
                for (JsonElement one : options.getAsJsonArray("ranges")) {
                    long begin = one.getAsJsonArray().get(0).getAsLong();
                    long end = one.getAsJsonArray().get(1).getAsLong();
                    ranges.add(Harness.fields("begin", begin, "end", end, "places", find(store, key, begin, end)));
                }
            }
            answers.add(Harness.fields("topic", key[0], "key", key[1], "places", find(store, key, 0, Long.MAX_VALUE),
                "ranges", ranges));
        }
        return answers;
    }

    /** Where the store's index says that messages with a key are which were stored between two times. */
    private static TreeSet<Long> find(MessageStore store, String[] key, long begin, long end) throws Exception {
        QueryMessageResult result = store.queryMessage(key[0], key[1], 64, begin, end);
        TreeSet<Long> places = new TreeSet<>();
        for (ByteBuffer raw : result.getMessageBufferList()) {
            MessageExt found = MessageDecoder.decode(raw, false);
            boolean carries = found != null && found.getTopic().equals(key[0])
                && (key[1].equals(found.getProperty("UNIQ_KEY"))
                || found.getKeys() != null && Arrays.asList(found.getKeys().split(" ")).contains(key[1]));
            if (carries) {                                 // hashes collide: the record decides, as in a client
                places.add(found.getCommitLogOffset());
            }
        }
        result.release();
        return places;
    }

    /** Timestamps around some of those that occur, and where the store says they are. */
    private void times(MessageStore store, String topic, int queueId, List<Long> stamps) throws Exception {
        TreeSet<Long> asked = new TreeSet<>(Arrays.asList(0L, stamps.get(0) - 60000, stamps.get(stamps.size() - 1) + 60000));
        long wanted = Harness.number(options, "times", 0);
        for (int i = 0; i <= wanted; i++) {
            long stamp = stamps.get((int) ((stamps.size() - 1) * i / wanted));
            asked.addAll(Arrays.asList(stamp - 1, stamp, stamp + 1));
        }
        List<Object> answers = new ArrayList<>();
        for (long stamp : asked) {
            Map<String, Object> answer = Harness.fields("timestamp", stamp, "offset", store.getOffsetInQueueByTime(topic, queueId, stamp));
            for (Method method : MessageStore.class.getMethods()) {                                  // 5.x
                if (method.getName().equals("getOffsetInQueueByTime") && method.getParameterCount() == 4) {
                    for (Object boundary : method.getParameterTypes()[3].getEnumConstants()) {
                        answer.put(((Enum<?>) boundary).name().toLowerCase(), method.invoke(store, topic, queueId, stamp, boundary));
                    }
                }
            }
            answers.add(answer);
        }
        times.add(Harness.fields("topic", topic, "queueId", queueId, "answers", answers));
    }

    private static List<MessageExt> unwrap(MessageExt batch) throws Exception {
        List<MessageExt> list = new ArrayList<>();
        MessageDecoder.class.getMethod("decodeMessage", MessageExt.class, List.class).invoke(null, batch, list);   // 5.x
        return list;
    }

    // ---- opening -----------------------------------------------------------------------------------------------

    /** Sizes are taken from the files; conf wins. Index sizes cannot be told from a file: give them if not the default. */
    private static DefaultMessageStore open(File dir, Properties conf) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(dir.getPath());
        config.setStorePathCommitLog(dir.getPath() + "/commitlog");
        Properties sizes = new Properties();
        size(sizes, "mappedFileSizeCommitLog", new File(dir, "commitlog"));
        size(sizes, "mappedFileSizeConsumeQueue", new File(dir, "consumequeue"));
        size(sizes, "mapperFileSizeBatchConsumeQueue", new File(dir, "batchconsumequeue"));
        sizes.setProperty("haListenPort", "0");
        sizes.setProperty("diskMaxUsedSpaceRatio", "95");
        sizes.setProperty("diskSpaceWarningLevelRatio", "97");
        sizes.setProperty("diskSpaceCleanForciblyRatio", "96");
        sizes.setProperty("fileReservedTime", "1000000");
        sizes.setProperty("duplicationEnable", "false");
        MixAll.properties2Object(sizes, config);
        MixAll.properties2Object(conf, config);
        BrokerConfig broker = new BrokerConfig();
        MixAll.properties2Object(conf, broker);
        BrokerStatsManager stats = new BrokerStatsManager("compat", true);
        MessageArrivingListener listener = (topic, queueId, offset, tagsCode, time, bitMap, properties) -> { };
        synchronized (Verify.class) {                          // 5.3 fills a map of the class that is not for threads
            for (Constructor<?> c : DefaultMessageStore.class.getConstructors()) {
                if (c.getParameterCount() == 5) {                                                          // 5.1 and later
                    return (DefaultMessageStore) c.newInstance(config, stats, listener, broker, topicConfigs(dir));
                }
                if (c.getParameterCount() == 4) {                                                          // 4.9.x
                    return (DefaultMessageStore) c.newInstance(config, stats, listener, broker);
                }
            }
        }
        throw new IllegalStateException("no known constructor");
    }

    private static void size(Properties sizes, String key, File dir) throws Exception {
        if (dir.isDirectory()) {
            try (var paths = Files.walk(dir.toPath())) {
                List<Path> files = new ArrayList<>();
                paths.filter(Files::isRegularFile).forEach(files::add);
                for (Path path : files) {
                    if (Files.size(path) > 0) {
                        sizes.setProperty(key, Long.toString(Files.size(path)));
                    }
                }
            }
        }
    }

    private static ConcurrentMap<String, TopicConfig> topicConfigs(File dir) throws Exception {
        ConcurrentMap<String, TopicConfig> table = new ConcurrentHashMap<>();
        File file = new File(dir, "config/topics.json");
        if (file.exists()) {
            JsonObject json = JsonParser.parseString(Files.readString(file.toPath())).getAsJsonObject();
            for (Map.Entry<String, JsonElement> e : json.getAsJsonObject("topicConfigTable").entrySet()) {
                TopicConfig config = new TopicConfig(e.getKey());
                JsonObject attributes = e.getValue().getAsJsonObject().getAsJsonObject("attributes");
                if (attributes != null) {
                    Map<String, String> map = new TreeMap<>();
                    attributes.entrySet().forEach(a -> map.put(a.getKey(), a.getValue().getAsString()));
                    TopicConfig.class.getMethod("setAttributes", Map.class).invoke(config, map);
                }
                table.put(e.getKey(), config);
            }
        }
        return table;
    }

    // ---- the directory -----------------------------------------------------------------------------------------

    private static Map<String, TreeSet<Integer>> topics(File dir) {
        Map<String, TreeSet<Integer>> topics = new TreeMap<>();
        for (String kind : new String[] {"consumequeue", "batchconsumequeue"}) {
            for (File topic : list(new File(dir, kind))) {
                for (File queue : list(topic)) {
                    topics.computeIfAbsent(topic.getName(), t -> new TreeSet<>()).add(Integer.parseInt(queue.getName()));
                }
            }
        }
        return topics;
    }

    private static Map<String, Long> files(File dir) {
        Map<String, Long> files = new TreeMap<>();
        for (String folder : new String[] {"commitlog", "index"}) {
            for (File file : list(new File(dir, folder))) {
                files.put(folder + "/" + file.getName(), file.length());
            }
        }
        return files;
    }

    /** Our own walk of the commit log by size and magic, before recovery touches it: {records, end}. */
    private static long[] walk(File dir) throws Exception {
        long records = 0;
        long end = 0;
        for (File file : list(new File(dir, "commitlog"))) {
            try (RandomAccessFile f = new RandomAccessFile(file, "r")) {
                long base = Long.parseLong(file.getName());
                long position = 0;
                while (position + 8 <= f.length()) {
                    f.seek(position);
                    int size = f.readInt();
                    int magic = f.readInt();
                    if ((magic != 0xDAA320A7 && magic != 0xDAA320AB) || size <= 0 || position + size > f.length()) {
                        break;
                    }
                    records++;
                    position += size;
                    end = base + position;
                }
            }
        }
        return new long[] {records, end};
    }

    private static File[] list(File dir) {
        File[] files = dir.listFiles();
        if (files == null) {
            return new File[0];
        }
        Arrays.sort(files);
        return files;
    }
}
