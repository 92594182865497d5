import java.io.FileWriter;
import java.io.PrintWriter;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageQueue;

/**
 * A producer for drills: one thread for each queue sends numbered messages, whatever happens to the brokers.
 *
 * Each outcome is a line of the ledger: broker, queue id, number, time of sending (ms), and queue offset if the broker acknowledged
 * the message. Without an acknowledgement the message may be stored or not; it is not sent again. A body is "broker/queue/number" and a filler. The
 * numbers of a queue go on when the producer is stopped and started again.
 */
final class Storing implements AutoCloseable {
    private static final String FILLER = " " + "x".repeat(100);
    private static final long TIMEOUT_MS = 3000;
    private final String namesrv;
    private final Map<MessageQueue, AtomicInteger> numbers = new ConcurrentHashMap<>();
    private final Map<MessageQueue, Thread> threads = new ConcurrentHashMap<>();
    private DefaultMQProducer producer;
    private PrintWriter ledger;
    private volatile boolean isStopped;

    Storing(String namesrv) {
        this.namesrv = namesrv;
    }

    /** Send to every queue of the topic that the name servers list; to more of them if it is called again. */
    void start(String topic, long pauseMs, String path) throws Exception {
        if (producer == null) {
            DefaultMQProducer made = new DefaultMQProducer("drill_producer");
            made.setNamesrvAddr(namesrv);
            made.setVipChannelEnabled(false);
            made.setPollNameServerInterval(1000);
            made.setSendMsgTimeout((int) TIMEOUT_MS);
            made.start();
            producer = made;
            ledger = new PrintWriter(new FileWriter(path, StandardCharsets.UTF_8, true));
        }
        isStopped = false;
        int count = 0;
        for (MessageQueue queue : producer.fetchPublishMessageQueues(topic)) {
            count++;
            threads.computeIfAbsent(queue, one -> {
                Thread thread = new Thread(() -> keepSending(one, pauseMs));
                thread.start();
                return thread;
            });
        }
        Harness.emit(Harness.fields("event", "sent", "count", count));
    }

    /** Stop sending. Every outcome is in the ledger then. */
    void stop() throws Exception {
        isStopped = true;
        List<Thread> running = new ArrayList<>(threads.values());
        threads.clear();
        for (Thread thread : running) {
            thread.join();
        }
        Harness.emit(Harness.fields("event", "sent", "count", running.size()));
    }

    private void keepSending(MessageQueue queue, long pauseMs) {
        AtomicInteger next = numbers.computeIfAbsent(queue, one -> new AtomicInteger());
        String place = queue.getBrokerName() + "/" + queue.getQueueId() + "/";
        while (!isStopped) {
            int number = next.getAndIncrement();
            Message message = new Message(queue.getTopic(), (place + number + FILLER).getBytes(StandardCharsets.UTF_8));
            long sentMs = System.currentTimeMillis();
            String outcome = "";
            try {
                SendResult sent = producer.send(message, queue, TIMEOUT_MS);
                outcome = Long.toString(sent.getQueueOffset());
            } catch (Exception unknown) {
                // also where the broker refused it: then nobody sees it
            }
            String line = queue.getBrokerName() + " " + queue.getQueueId() + " " + number + " " + sentMs + " " + outcome;
            synchronized (ledger) {
                ledger.println(line);
                ledger.flush();
            }
            try {
                Thread.sleep(outcome.isEmpty() ? 500 : pauseMs);
            } catch (InterruptedException stopped) {
                return;
            }
        }
    }

    @Override
    public void close() throws Exception {
        isStopped = true;
        if (producer != null) {
            producer.shutdown();
            ledger.close();
        }
    }
}
