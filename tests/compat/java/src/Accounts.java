import java.util.Properties;
import org.apache.rocketmq.broker.BrokerController;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.remoting.netty.NettyClientConfig;
import org.apache.rocketmq.remoting.netty.NettyServerConfig;
import org.apache.rocketmq.store.config.MessageStoreConfig;

/** Accounts of 5.3, by reflection, because earlier releases do not have the classes. */
final class Accounts {
    /** A broker, which checks accounts if its configuration says so, as BrokerStartup makes it. */
    static BrokerController broker(Properties properties, BrokerConfig config, NettyServerConfig server,
        NettyClientConfig client, MessageStoreConfig store) throws Exception {
        if (!Boolean.parseBoolean(properties.getProperty("authenticationEnabled"))) {
            return new BrokerController(config, server, client, store);
        }
        Class<?> type = Class.forName("org.apache.rocketmq.auth.config.AuthConfig");
        Object auth = type.getConstructor().newInstance();
        MixAll.properties2Object(properties, auth);
        type.getMethod("setConfigName", String.class).invoke(auth, config.getBrokerName());
        type.getMethod("setClusterName", String.class).invoke(auth, config.getBrokerClusterName());
        type.getMethod("setAuthConfigPath", String.class).invoke(auth, store.getStorePathRootDir() + "/config");
        return BrokerController.class
            .getConstructor(BrokerConfig.class, NettyServerConfig.class, NettyClientConfig.class, MessageStoreConfig.class, type)
            .newInstance(config, server, client, store, auth);
    }
}
