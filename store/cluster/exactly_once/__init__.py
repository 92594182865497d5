"""The sink of a live cluster that stores each row once: stage, intent, publish, done.

target_topics.py     the topics to which rows are written: which are refused, and their queues
stage_task.py        a task: encodes its rows, and stages them; run_packing.py cuts them into runs and blobs
sink.py              the sink of the contract
staged_batch.py      staged rows, the receipt of a task, and a batch; staged_checks.py what its intent relies on
batch_commit.py      the commit of a batch: sessions, until it is stored
session_attempts.py  sessions one after the other, as long as something moves
commit_session.py    one session: begins a batch and publishes it, or finishes one that others have begun
taking_over.py       fences the sessions that have begun a batch, and reads back; target_bounds.py bounds of queues
sink_place.py        what the sessions of a commit share
registration.py      the connections of a session to target brokers, which list it as a producer as long as they last
target_calls.py      requests of a session to brokers by name, and the error that ends the session
ledger_rows.py       the rows of the ledger, their bytes, and what the rows of a query mean
marks.py             the numbers of a query that outlive its rows, and what may be believed of rows and marks
ledger.py            reads and writes rows and marks at the ledger's broker
ledger_location.py   finds that broker, and has it tell its name
ledger_messages.py   the request that appends a row; rows in the answers to pulls
blobs.py             blobs of the stage topic, and the runs in them
publishing.py        runs -> target queues, in order, one request in flight for each queue
barrier.py           waits until a broker has stored and shows what it had read
read_back.py         which rows of a begun batch are stored; found_rows.py decides it by the messages of a queue
written_rows.py      how many rows each target queue has, and which queues cannot be finished
preparation.py       creates and checks the stage and the ledger; sink_doctor.py tries all that a write needs
open_intents.py      lists the batches that are not finished; intent_ending.py finishes or skips one
"""
