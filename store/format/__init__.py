"""Formats of RocketMQ's files: decoders and encoders.

The functions are pure. They do not open files, read the clock or use random numbers.

| file in a store, or part of one | module |
| --- | --- |
| `commitlog/<20 digits>` | one record: `record`; many records: `record_headers`, `record_batch`, `rows`, `columns`, |
| | `byte_ranges` |
| records copied to another queue | `record_rewrite`, `index_keys` |
| properties of a record | `properties`, `property_encoder` |
| compressed body of a record | `body_codec` |
| `consumequeue`, `batchconsumequeue`, `consumequeue_ext` | `consume_queue_entry` |
| `index/<17 digits>` | `index_file`, `index_keys` |
| `checkpoint`, `abort` | `checkpoint` |
| `timerlog`, `timerwheel`, `config/timercheck` | `timer` |
| `config/*.json` | `config_json`, which uses `fastjson` |
| new messages, which become records | `message_encoder`, `single_message`, `message_columns`, `queue_router`, |
| | `delay_routing`, `delay_levels` |
| messages of programs, before they are encoded | `message_table` |
| new messages for a cluster | `batch_items`, `broker_router`, `content_ids` |
| rows of messages that are sent back | `failed_columns`, `failed_rows` |
| dead letters that are republished | `letter_choice` |
| `rmq/queues` | `queue_registry` |
| `rmq/watermark`, `rmq/holder.json`, `rmq/settings.json`, `rmq/rebuild` | `own_files` |
| other JSON files in `rmq/` | `side_file` |
| paths of these files | `file_names` |
| message ids | `message_ids` |
| Java's hash of a text, host fields | `java` |

These modules may import `store.errors`, `store.model`, `store.names`, numpy, pyarrow, and modules of the standard
library that use neither files nor the clock. `docs/FORMAT.md` describes the same layouts, and a test compares it with
these modules.
"""
