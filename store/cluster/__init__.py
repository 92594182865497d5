"""A live cluster as a place of the contract (`store.backend`), over RocketMQ's remoting protocol.

frame.py           bytes <-> commands, each with a header and a body
codes.py           the numbers of requests and responses
requests.py        the requests for routes, positions and messages; group_requests.py those about groups
producer_requests.py  the requests about the producers of a group
admin_requests.py  the request that resets a group; admin_answers.py what the codes mean to requests of administrators
responses.py       what they return; answer_fields.py checks the contents
answer_rules.py    which responses are answers, and which are errors; answer_rule.py one rule
signing.py         the signature of an account
namespace.py       names of topics and groups with a namespace
address.py         where the cluster is: name servers, account, TLS; credentials.py reads the file of an account
client.py          requests to name servers and brokers; server.py those to one of them, ticket.py one request
client_context.py  what the servers of one client share; failures.py explains why one does not answer
connection.py      one socket
routes.py          what name servers list, and listed before
queue_answers.py   rules for the queues of brokers that go away and come back
positions.py       bounds, offsets of times, single records; time_search.py the search for a time
catalog.py         what a reader knows: topics, queues and answers about them
puller.py          reads ranges; pull_pipeline.py and pull_pace.py decide which pulls are in flight
pulled_records.py  bodies of pulls -> record batches
long_poll.py       pulls that brokers hold until a message arrives
doctor.py          what a query needs, tried at every server; diagnosis.py what the answers mean
backend.py         a cluster as a place of the contract; reader.py the same for programs
send_requests.py   the requests that store messages, and their responses; send_answers.py what the codes mean to them
write_routes.py    the queues to which messages of a topic are sent; new topics
message_spool.py   encoded messages that wait to be sent
sender.py          sends a spool: one request in flight for each queue
sink.py            the sink of the contract: tasks that send, at least once
exactly_once/      the sink of the contract that stores each batch once: stage, intent, publish, done
broker_calls.py    many requests to brokers by name, repeated while a broker is away
send_back.py       checks failed rows and sends them back; resent_messages.py sends those that have expired
send_back_sink.py  the sink of failed rows: tasks check them, and the commit sends them back
dead_letters.py    republishes the dead letters of a group
consumer.py        a pull consumer for programs; pull_answers.py the results of its pulls, offset_commits.py its offsets
group_progress.py  what brokers tell about groups; group_lag.py the table of lag, group_listing.py that of members
offset_resets.py   resets of groups by an administrator
statistics_requests.py  the requests for what brokers have counted; broker_statistics.py brokers, routes and rates
topic_administration.py  topics that an administrator creates, alters and deletes
"""
