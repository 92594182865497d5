import com.google.gson.Gson;
import com.google.gson.GsonBuilder;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.io.BufferedReader;
import java.io.File;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;

/**
 * A real RocketMQ, driven over stdin and stdout.
 *
 *   broker --store DIR --port P --home DIR [--ip 127.0.0.1] [--conf k=v]...    a name server and a broker
 *          [--alone true]                                                     only the broker
 *   namesrv --port P --home DIR                                                only a name server
 *   client --namesrv 127.0.0.1:N --home DIR                                    the Java client: one operation a line
 *   speed --namesrv 127.0.0.1:N --home DIR                                     the Java client for measurements
 *   proxy --home DIR                                                           a proxy: see home/conf/rmq-proxy.json (5.x)
 *   member --namesrv 127.0.0.1:N --group G --topic T --name M --ledger FILE    a push consumer: see Member
 *   mqadmin --home DIR                                                         RocketMQ's tool: the words of one command a line
 *   verify --home DIR                                                          the store classes: one store a line
 *   probe --home DIR                                                           does RocketMQ find an address of its own?
 *
 * stdout carries JSON lines only; whatever RocketMQ prints goes to stderr. The end of stdin is the order to stop.
 */
public final class Harness {
    static final Gson GSON = new GsonBuilder().disableHtmlEscaping().create();
    static final BufferedReader STDIN = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    private static final PrintStream OUT = new PrintStream(System.out, true, StandardCharsets.UTF_8);

    public static void main(String[] args) {
        System.setOut(System.err);                             // 5.x's logback prints its configuration there
        JsonObject options = options(args);
        String home = options.get("home").getAsString();
        new File(home).mkdirs();
        // Logs and local offsets go below it. RocketMQ reads this when its first class is loaded.
        System.setProperty("user.home", home);
        System.setProperty("rocketmq.home.dir", home);
        System.setProperty("rocketmq.client.logUseSlf4j", "true");
        System.setProperty("rocketmq.client.localOffsetStoreDir", home + "/local_offsets");
        try {
            run(args[0], options);
        } catch (Throwable e) {
            e.printStackTrace();
            System.exit(1);                                    // RocketMQ leaves non-daemon threads: never just return
        }
        System.exit(0);
    }

    private static void run(String command, JsonObject options) throws Exception {
        switch (command) {
            case "broker":
                Server.run(options);
                break;
            case "namesrv":
                Server.runNameServer((int) number(options, "port", 9876));
                break;
            case "client":
                try (Client client = new Client(text(options, "namesrv", null))) {
                    for (String line; (line = STDIN.readLine()) != null; ) {
                        client.execute(JsonParser.parseString(line).getAsJsonObject());
                    }
                }
                break;
            case "speed":
                try (Speed speed = new Speed(text(options, "namesrv", null))) {
                    for (String line; (line = STDIN.readLine()) != null; ) {
                        speed.execute(JsonParser.parseString(line).getAsJsonObject());
                    }
                }
                break;
            case "member":
                try (Member member = new Member(options)) {
                    member.run();
                }
                break;
            case "mqadmin":
                Tools.run();
                break;
            case "proxy":
                Proxy.run();
                break;
            case "verify":
                Verify.run();
                break;
            case "probe":                                      // both fail where only a loopback interface is
                emit(fields("event", "found", "localhost", MixAll.LOCALHOST, "broker", new BrokerConfig().getBrokerIP1()));
                break;
            default:
                throw new IllegalArgumentException("commands: broker namesrv client speed member mqadmin proxy verify probe");
        }
    }

    static synchronized void emit(Object value) {
        OUT.println(GSON.toJson(value));
        OUT.flush();
    }

    /** emit(fields("event", "ready", "port", 1)) */
    static Map<String, Object> fields(Object... pairs) {
        Map<String, Object> map = new LinkedHashMap<>();
        for (int i = 0; i < pairs.length; i += 2) {
            map.put((String) pairs[i], pairs[i + 1]);
        }
        return map;
    }

    /** --name value becomes {"name": "value"}; --conf k=v may be repeated and becomes {"conf": {k: v}}. */
    private static JsonObject options(String[] args) {
        JsonObject options = new JsonObject();
        options.add("conf", new JsonObject());
        for (int i = 1; i < args.length; i += 2) {
            String name = args[i].replaceFirst("^--", "");
            String value = args[i + 1];
            if (name.equals("conf")) {
                int split = value.indexOf('=');
                options.getAsJsonObject("conf").addProperty(value.substring(0, split), value.substring(split + 1));
            } else {
                options.addProperty(name, value);
            }
        }
        return options;
    }

    static String text(JsonObject object, String name, String otherwise) {
        return object.has(name) && !object.get(name).isJsonNull() ? object.get(name).getAsString() : otherwise;
    }

    static long number(JsonObject object, String name, long otherwise) {
        return object.has(name) && !object.get(name).isJsonNull() ? object.get(name).getAsLong() : otherwise;
    }

    static boolean flag(JsonObject object, String name) {
        return object.has(name) && object.get(name).getAsBoolean();
    }
}
