"""Name servers and brokers of RocketMQ in this process, for tests: they speak the remoting protocol on 127.0.0.1.

    from rmq_spark.store.testing.brokers import RunningCluster, faults

    with RunningCluster(tmp_path, release="4.9", name_servers=2, brokers=2) as cluster:
        cluster.create_topic("orders", queues=4)
        cluster.send("orders", b"one", b"two", broker="broker-a", queue_id=0, tags="A", keys="k1")
        ...  # cluster.address is the value of the option nameServer
        cluster.brokers["broker-a"].kill()
        cluster.brokers["broker-a"].restart(new_port=True)

The fixture `rmq_cluster` of the pytest plugin starts one for a test (docs/TESTING.md).

Messages are in store directories that the engine writes and reads (`folder / broker name`), so record bytes, consume
queues, filters and limits of pulls are real. Topics without a message reach the directory when a store is copied or
closed. A light cluster (`is_light=True`) stores nothing and only counts; fifty
brokers with 20,000 queues start in less than a second.

| to | use |
| --- | --- |
| create, change, delete topics | `cluster.create_topic`, `cluster.delete_topic`, `Broker.set_topic(name, perm=…)` |
| append messages | `Broker.send`, `Broker.send_rows`, `Broker.write` for anything else that the engine can do |
| let messages arrive that nobody looks at | `cluster.advance`, in a light cluster |
| see what clients sent | pulls, `Broker.bounds`, `Broker.sends.most_in_flight` |
| execute sends in another order | `broker.settings.holds_sends_ms = 20`, `send_order` |
| show messages later than they are acknowledged | `broker.settings.dispatch_delay_ms` |
| deliver delayed messages | `Broker.deliver_due(now_ms)`; with `settings.delivers` they are delivered when due |
| let messages expire | `Broker.expire(topic, queue_id, before, keeps_minimum=…)`, `MessageStore.expire_log` |
| replace a store | `Broker.copy_store(path)`, `Broker.replace_store(path)`; a new path is an empty store |
| take a server away | `stop`, `kill`, `restart(new_port=…)`, `freeze`, `thaw`, `cluster.forget(broker)` |
| empty the routes | `NameServer.restart()`, then `cluster.register_all()` |
| fail over | `cluster.add_slave(name)`, `Broker.act_as_master()` |
| spoil answers | `Server.fail(code, faults.garbage(), times=…, when=…)`, `Server.heal()`; see `faults` |
| lose answers to sends | `faults.closes_connection(executes=…)`, `nothing(executes=…)`, `killed_in_batch(items)` |
| refuse sends | `faults.busy()`, `faults.disk_full()`, `settings.max_message_bytes`, `settings.creates_topics` |
| answer stored sends wrongly | `faults.stored_late(code)`, `faults.with_fields(msgId=None)` |
| add members of a group | `RawClient.heartbeat`; without a connection `Broker.members.add`, `remove` |
| let members fall silent | `Broker.members.expire`, `Broker.pass_time`, `settings.member_idle_s` |
| add or lose producers of a group | `RawClient.produce`; without a connection `Broker.producers.add`; `remove` |
| let locks of queues expire | `Broker.pass_time`; a broker that ends forgets them |
| lose heartbeats and notices | `faults.with_code(0)` for 34, `settings.notifies_members` |
| reset a group's offsets | request 222, or `Broker.offsets.reset`; `settings.resets_at_broker`, `Broker.sent_resets` |
| lose the last commits | set `Broker.offsets.committed` to an older copy |
| ask a member | `Broker.ask_member`; a member of a test answers with `RawClient.receive_request`, `respond` |
| let members not answer in time | `settings.member_answer_s` |
| count requests | `cluster.clear_requests()`, `Server.requests`, `Server.seen_requests(code)` |
| check rights | `broker.accounts = AccountTable(Account(…))` |
| speak TLS | `RunningCluster(tls=ServerTls(cert_file, key_file))` |
| change limits | `broker.settings.on_disk = True`, and other fields of `BrokerSettings` |

One thread serves all sockets of a cluster. Methods of servers may be called from any thread; they run in that one.
Requests have one handler each, in modules `*_requests.py`; `broker.HANDLER_TABLES` names these modules. An error of a
handler is raised when the cluster is closed.
"""

from rmq_spark.store.testing.brokers import faults
from rmq_spark.store.testing.brokers.accounts import Account, AccountTable
from rmq_spark.store.testing.brokers.broker import Broker, BrokerSettings
from rmq_spark.store.testing.brokers.group_members import ConsumerData
from rmq_spark.store.testing.brokers.name_server import NameServer
from rmq_spark.store.testing.brokers.releases import RELEASES, Release
from rmq_spark.store.testing.brokers.running_cluster import RunningCluster
from rmq_spark.store.testing.brokers.server import ServerTls
from rmq_spark.store.testing.brokers.topics import Topic
from rmq_spark.store.testing.brokers.wire import Answer

__all__ = [
    "RELEASES",
    "Account",
    "AccountTable",
    "Answer",
    "Broker",
    "BrokerSettings",
    "ConsumerData",
    "NameServer",
    "Release",
    "RunningCluster",
    "ServerTls",
    "Topic",
    "faults",
]
