import com.google.gson.JsonObject;
import java.io.FileOutputStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.MessageSelector;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeOrderlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.consumer.listener.MessageListenerOrderly;
import org.apache.rocketmq.client.impl.consumer.ProcessQueue;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * A push consumer that is a member of a group until stdin ends, when it leaves in order.
 *
 * It writes a ledger, one JSON line for each message before it is consumed, and one for each change of the queues that it has. A
 * line is in the file when it is written, so a process that is killed leaves a ledger of all that it consumed.
 */
final class Member implements AutoCloseable {
    private static final long LOOK_MS = 20;                    // at the queues
    private final DefaultMQPushConsumer consumer;
    private final FileOutputStream ledger;
    private final boolean orderly;
    private final long sleepMs;
    private final String failMark;
    private volatile boolean closing;
    private final Thread watcher = new Thread(this::watch, "queues");

    /**
     * namesrv, group, topic, name, ledger, expr?, exprType TAG|SQL92, orderly?, pop? (5.x), sleepMs? (for each message), threads?,
     * from first|last, failMark? (a message whose body begins with it fails), maxReconsumeTimes?
     */
    Member(JsonObject options) throws Exception {
        orderly = Harness.flag(options, "orderly");
        sleepMs = Harness.number(options, "sleepMs", 0);
        failMark = Harness.text(options, "failMark", null);
        ledger = new FileOutputStream(Harness.text(options, "ledger", null), true);
        consumer = new DefaultMQPushConsumer(Harness.text(options, "group", null));
        consumer.setNamesrvAddr(Harness.text(options, "namesrv", null));
        consumer.setInstanceName(Harness.text(options, "name", "member"));
        consumer.setVipChannelEnabled(false);
        consumer.setMqClientApiTimeout(20000);
        int threads = (int) Harness.number(options, "threads", 4);
        consumer.setConsumeThreadMin(threads);
        consumer.setConsumeThreadMax(threads);
        consumer.setConsumeFromWhere(Harness.text(options, "from", "first").equals("first")
            ? ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET : ConsumeFromWhere.CONSUME_FROM_LAST_OFFSET);
        if (options.has("maxReconsumeTimes")) {
            consumer.setMaxReconsumeTimes((int) Harness.number(options, "maxReconsumeTimes", 16));
        }
        if (Harness.flag(options, "pop")) {                    // the broker must have the mode POP for the group and the topic
            DefaultMQPushConsumer.class.getMethod("setClientRebalance", boolean.class).invoke(consumer, false);
        }
        String expr = Harness.text(options, "expr", "*");
        consumer.subscribe(Harness.text(options, "topic", null), Harness.text(options, "exprType", "TAG").equals("SQL92")
            ? MessageSelector.bySql(expr) : MessageSelector.byTag(expr));
        if (orderly) {
            consumer.registerMessageListener((MessageListenerOrderly) (messages, context) ->
                consume(messages.get(0)) ? ConsumeOrderlyStatus.SUCCESS : ConsumeOrderlyStatus.SUSPEND_CURRENT_QUEUE_A_MOMENT);
        } else {
            consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) ->
                consume(messages.get(0)) ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER);
        }
    }

    void run() throws Exception {
        consumer.start();
        watcher.start();
        Harness.emit(Harness.fields("event", "ready", "pid", ProcessHandle.current().pid(),
            "clientId", consumer.getDefaultMQPushConsumerImpl().getmQClientFactory().getClientId()));
        while (Harness.STDIN.readLine() != null) {
            // a member has no orders
        }
    }

    /** Write a message down, and say whether it was consumed. */
    private boolean consume(MessageExt m) {
        boolean fails = failMark != null && new String(m.getBody(), StandardCharsets.UTF_8).startsWith(failMark);
        write(Harness.fields("event", "message", "atMs", System.currentTimeMillis(), "topic", m.getTopic(),
            "broker", m.getBrokerName(), "queueId", m.getQueueId(), "offset", m.getQueueOffset(),
            "body", new String(m.getBody(), StandardCharsets.UTF_8), "reconsumeTimes", m.getReconsumeTimes(), "fails", fails));
        if (sleepMs > 0) {
            try {
                Thread.sleep(sleepMs);
            } catch (InterruptedException leaving) {
                Thread.currentThread().interrupt();
            }
        }
        return !fails;
    }

    /** Write down which queues this member has, orderly ones while they are locked, each time that they change. */
    private void watch() {
        List<String> known = null;
        while (!closing) {
            List<String> found = queues();
            if (!found.equals(known)) {
                write(Harness.fields("event", "queues", "atMs", System.currentTimeMillis(), "queues", found));
                known = found;
            }
            try {
                Thread.sleep(LOOK_MS);
            } catch (InterruptedException end) {
                return;
            }
        }
    }

    private List<String> queues() {
        Map<MessageQueue, ProcessQueue> sorted =
            new TreeMap<>(consumer.getDefaultMQPushConsumerImpl().getRebalanceImpl().getProcessQueueTable());
        List<String> names = new ArrayList<>();
        for (Map.Entry<MessageQueue, ProcessQueue> e : sorted.entrySet()) {
            if (!e.getValue().isDropped() && (!orderly || e.getValue().isLocked() && !e.getValue().isLockExpired())) {
                names.add(e.getKey().getTopic() + ":" + e.getKey().getBrokerName() + ":" + e.getKey().getQueueId());
            }
        }
        return names;
    }

    private synchronized void write(Map<String, Object> line) {
        try {
            ledger.write((Harness.GSON.toJson(line) + "\n").getBytes(StandardCharsets.UTF_8));
        } catch (java.io.IOException e) {
            throw new java.io.UncheckedIOException(e);
        }
    }

    /** Leave: consume nothing any more, commit the offsets, tell the brokers. */
    @Override
    public void close() throws Exception {
        consumer.shutdown();
        closing = true;
        watcher.join();
        write(Harness.fields("event", "queues", "atMs", System.currentTimeMillis(), "queues", List.of()));
        ledger.close();
        Harness.emit(Harness.fields("event", "left"));
    }
}
