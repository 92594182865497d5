import com.google.gson.JsonObject;
import java.nio.charset.StandardCharsets;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.ArrayList;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.Callable;
import java.util.concurrent.atomic.AtomicInteger;
import org.apache.rocketmq.client.consumer.DefaultLitePullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.exception.MQBrokerException;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;

/** The Java client for measurements: one JSON operation in, one JSON line out, and a line for each message that is listened to. */
final class Speed implements AutoCloseable {
    private static final int PULLED = 32;                      // what a broker returns at most, by default
    private static final int SYSTEM_BUSY = 2;                  // ResponseCode, whose package differs by version
    private static final AtomicInteger INSTANCE = new AtomicInteger();
    private final String namesrv;
    private final Sending sending;
    private DefaultMQPullConsumer puller;
    private DefaultMQProducer producer;
    private DefaultMQPushConsumer listener;

    Speed(String namesrv) {
        this.namesrv = namesrv;
        this.sending = new Sending(namesrv);
    }

    void execute(JsonObject op) throws Exception {
        String topic = op.get("topic").getAsString();
        switch (op.get("op").getAsString()) {
            case "pull":
                pull(topic);
                break;
            case "lite":
                lite(topic, op.get("messages").getAsLong());
                break;
            case "send":
                send(topic, op.get("text").getAsString());
                break;
            case "send-all":
                sending.run(op);
                break;
            case "listen":
                listen(topic);
                break;
            default:
                throw new IllegalArgumentException("op is one of pull lite send send-all listen");
        }
    }

    /** Reads a topic from its begin to its end with DefaultMQPullConsumer, one thread for each queue. */
    private void pull(String topic) throws Exception {
        if (puller == null) {
            puller = new DefaultMQPullConsumer("speed_pull");
            puller.setNamesrvAddr(namesrv);
            puller.setInstanceName("pull" + INSTANCE.incrementAndGet());
            puller.setVipChannelEnabled(false);
            puller.setMqClientApiTimeout(20000);
            puller.start();
        }
        Collection<MessageQueue> queues = repeat(() -> puller.fetchSubscribeMessageQueues(topic));
        List<long[]> counts = new ArrayList<>();
        List<Thread> threads = new ArrayList<>();
        List<Throwable> failures = new ArrayList<>();
        long begin = System.nanoTime();
        for (MessageQueue queue : queues) {
            long[] count = new long[2];
            counts.add(count);
            Thread thread = new Thread(() -> {
                try {
                    pullQueue(queue, count);
                } catch (Throwable e) {
                    synchronized (failures) {
                        failures.add(e);
                    }
                }
            });
            threads.add(thread);
            thread.start();
        }
        for (Thread thread : threads) {
            thread.join();
        }
        if (!failures.isEmpty()) {
            throw new IllegalStateException(failures.get(0));
        }
        report(begin, counts);
    }

    private void pullQueue(MessageQueue queue, long[] count) throws Exception {
        long end = puller.maxOffset(queue);
        for (long offset = puller.minOffset(queue); offset < end; ) {
            PullResult result = puller.pull(queue, "*", offset, PULLED);
            if (result.getPullStatus() == PullStatus.FOUND) {
                for (MessageExt message : result.getMsgFoundList()) {
                    count[0]++;
                    count[1] += message.getBody().length;
                }
            }
            offset = result.getNextBeginOffset();
        }
    }

    /** Reads the messages of a topic, which begins at 0, with DefaultLitePullConsumer, which pulls ahead by itself. */
    private void lite(String topic, long messages) throws Exception {
        DefaultLitePullConsumer consumer = new DefaultLitePullConsumer("speed_lite");
        consumer.setNamesrvAddr(namesrv);
        consumer.setInstanceName("lite" + INSTANCE.incrementAndGet());
        consumer.setVipChannelEnabled(false);
        consumer.setMqClientApiTimeout(20000);
        consumer.setAutoCommit(false);
        consumer.setPullBatchSize(PULLED);                     // by default it asks for 10
        consumer.start();
        try {
            Collection<MessageQueue> queues = repeat(() -> consumer.fetchMessageQueues(topic));
            Map<MessageQueue, Long> next = new HashMap<>();
            for (MessageQueue queue : queues) {
                next.put(queue, 0L);
            }
            long[] count = new long[2];
            long begin = System.nanoTime();
            consumer.assign(queues);
            for (MessageQueue queue : queues) {
                consumer.seek(queue, 0);
            }
            while (count[0] < messages) {
                for (MessageExt message : consumer.poll(1000)) {
                    MessageQueue queue = new MessageQueue(message.getTopic(), message.getBrokerName(), message.getQueueId());
                    if (message.getQueueOffset() == next.get(queue)) {
                        next.put(queue, message.getQueueOffset() + 1);
                        count[0]++;
                        count[1] += message.getBody().length;
                    }
                }
            }
            report(begin, List.of(count));
        } finally {
            consumer.shutdown();
        }
    }

    private static void report(long begin, List<long[]> counts) {
        double seconds = (System.nanoTime() - begin) / 1e9;
        long messages = counts.stream().mapToLong(count -> count[0]).sum();
        long bytes = counts.stream().mapToLong(count -> count[1]).sum();
        Harness.emit(Harness.fields("event", "read", "seconds", seconds, "messages", messages, "bytes", bytes));
    }

    /** Sends a message, and reports the time just before. */
    private void send(String topic, String text) throws Exception {
        if (producer == null) {
            producer = new DefaultMQProducer("speed_producer");
            producer.setNamesrvAddr(namesrv);
            producer.setInstanceName("send" + INSTANCE.incrementAndGet());
            producer.setVipChannelEnabled(false);
            producer.setMqClientApiTimeout(20000);
            producer.start();
        }
        MessageQueue queue = repeat(() -> producer.fetchPublishMessageQueues(topic)).get(0);
        Message message = new Message(topic, text.getBytes(StandardCharsets.UTF_8));
        for (int tries = 0; ; tries++) {
            long begin = nowUs();
            try {
                producer.send(message, queue, 10000);
                Harness.emit(Harness.fields("event", "sent", "us", begin, "sentUs", nowUs()));
                return;
            } catch (MQBrokerException e) {                    // refused by a broker on a busy machine, and not stored
                if (e.getResponseCode() != SYSTEM_BUSY || tries == 100) {
                    throw e;
                }
            }
        }
    }

    /** Repeats a question that failed, as it may on a busy machine. */
    private static <T> T repeat(Callable<T> ask) throws Exception {
        for (int tries = 0; ; tries++) {
            try {
                return ask.call();
            } catch (MQClientException e) {
                if (tries == 100) {
                    throw e;
                }
                Thread.sleep(100);
            }
        }
    }

    /** Starts a push consumer that reports the time and the text of each message. */
    private void listen(String topic) throws Exception {
        listener = new DefaultMQPushConsumer("speed_push");
        listener.setNamesrvAddr(namesrv);
        listener.setInstanceName("push" + INSTANCE.incrementAndGet());
        listener.setVipChannelEnabled(false);
        listener.setMqClientApiTimeout(20000);
        listener.subscribe(topic, "*");
        listener.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            long now = nowUs();
            for (MessageExt message : messages) {
                Harness.emit(Harness.fields("event", "arrived", "us", now, "text", new String(message.getBody(), StandardCharsets.UTF_8)));
            }
            return ConsumeConcurrentlyStatus.CONSUME_SUCCESS;
        });
        listener.start();
        Harness.emit(Harness.fields("event", "listening"));
    }

    /** Microseconds since the epoch, by the clock that all processes of the machine share. */
    private static long nowUs() {
        return ChronoUnit.MICROS.between(Instant.EPOCH, Instant.now());
    }

    @Override
    public void close() {
        sending.close();
        if (puller != null) {
            puller.shutdown();
        }
        if (producer != null) {
            producer.shutdown();
        }
        if (listener != null) {
            listener.shutdown();
        }
    }
}
