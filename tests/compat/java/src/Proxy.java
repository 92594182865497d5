/** A proxy of 5.x, until stdin ends. By reflection, because 4.9 has none. */
final class Proxy {
    static void run() throws Exception {
        System.setProperty("RMQ_PROXY_HOME", System.getProperty("user.home"));
        Class.forName("org.apache.rocketmq.proxy.ProxyStartup").getMethod("main", String[].class)
            .invoke(null, (Object) new String[0]);                  // returns when it serves, and exits if it cannot
        Harness.emit(Harness.fields("event", "ready", "pid", ProcessHandle.current().pid()));
        while (Harness.STDIN.readLine() != null) {
            // it has no orders
        }
    }
}
