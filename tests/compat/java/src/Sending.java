import com.google.gson.JsonObject;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;

/** How fast the Java producer sends: synchronous batches or single messages, over all queues, from threads of one producer. */
final class Sending implements AutoCloseable {
    private static final int SYSTEM_BUSY = 2;                  // ResponseCode, whose package differs by version
    private static final int LARGEST_BYTES = 4 << 20;          // maxMessageSize of producer and broker
    /** A record's fixed fields and its UNIQ_KEY, WAIT and CLUSTER, generously: brokers refuse batches whose records are larger. */
    private static final int RECORD_BYTES = 91 + 130;
    private final String namesrv;
    private final AtomicLong refused = new AtomicLong();
    private DefaultMQProducer producer;

    Sending(String namesrv) {
        this.namesrv = namesrv;
    }

    /** The most messages of a batch that a broker takes. */
    private static int largest(String topic, int bodyBytes) {
        return LARGEST_BYTES / (RECORD_BYTES + topic.length() + bodyBytes);
    }

    /**
     * topic, messages, batch? (1: single sends without a batch; 0: the largest batches), threads?, bodyBytes?: send them, and report the
     * seconds. The producer, its connections and its route are there before the time begins; the first runs compile.
     */
    void run(JsonObject op) throws Exception {
        String topic = op.get("topic").getAsString();
        long messages = op.get("messages").getAsLong();
        int threads = (int) Harness.number(op, "threads", 1);
        byte[] body = "x".repeat((int) Harness.number(op, "bodyBytes", 200)).getBytes(StandardCharsets.UTF_8);
        int asked = (int) Harness.number(op, "batch", 1);
        int batch = asked > 0 ? asked : largest(topic, body.length);
        start(topic);
        refused.set(0);
        List<Thread> running = new ArrayList<>();
        List<Throwable> failures = new ArrayList<>();
        long begin = System.nanoTime();
        for (int number = 0; number < threads; number++) {
            long share = messages * (number + 1) / threads - messages * number / threads;
            Thread thread = new Thread(() -> {
                try {
                    sendAll(topic, body, share, batch);
                } catch (Throwable e) {
                    synchronized (failures) {
                        failures.add(e);
                    }
                }
            });
            running.add(thread);
            thread.start();
        }
        for (Thread thread : running) {
            thread.join();
        }
        double seconds = (System.nanoTime() - begin) / 1e9;
        if (!failures.isEmpty()) {
            throw new IllegalStateException(failures.get(0));
        }
        Harness.emit(Harness.fields("event", "sent", "seconds", seconds, "messages", messages, "batch", batch, "threads", threads,
            "refused", refused.get()));
    }

    private void sendAll(String topic, byte[] body, long messages, int batch) throws Exception {
        for (long left = messages; left > 0; ) {
            if (batch == 1) {
                send(new Message(topic, body));
                left--;
            } else {
                int size = (int) Math.min(batch, left);
                List<Message> list = new ArrayList<>(size);
                for (int i = 0; i < size; i++) {
                    list.add(new Message(topic, body));
                }
                send(list);
                left -= size;
            }
        }
    }

    /** Send a message or a list of them to the next queue, again where a broker on a busy machine refused it, and did not store it. */
    private void send(Object what) throws Exception {
        for (int tries = 0; ; tries++) {
            try {
                if (what instanceof Message) {
                    producer.send((Message) what);
                } else {
                    @SuppressWarnings("unchecked")
                    List<Message> list = (List<Message>) what;
                    producer.send(list);
                }
                return;
            } catch (MQBrokerException e) {
                if (e.getResponseCode() != SYSTEM_BUSY || tries == 100) {
                    throw e;
                }
                refused.incrementAndGet();
            }
        }
    }

    private void start(String topic) throws Exception {
        if (producer == null) {
            DefaultMQProducer made = new DefaultMQProducer("speed_sending");
            made.setNamesrvAddr(namesrv);
            made.setInstanceName("sending");
            made.setVipChannelEnabled(false);
            made.setMqClientApiTimeout(20000);
            made.setSendMsgTimeout(30000);
            made.start();
            producer = made;
        }
        for (int tries = 0; ; tries++) {                       // on a busy machine a question may fail
            try {
                producer.fetchPublishMessageQueues(topic);
                return;
            } catch (MQClientException e) {
                if (tries == 100) {
                    throw e;
                }
                Thread.sleep(100);
            }
        }
    }

    @Override
    public void close() {
        if (producer != null) {
            producer.shutdown();
        }
    }
}
