"""Bytes <-> values: what RocketMQ's files hold, one module for each thing on disk. Pure: no files, no clock.

| file in a store | module |
| --- | --- |
| `commitlog/<20 digits>` | `record`; many at once: `heads`, `record_columns`, `record_cut`, `rows`, |
| | `columns`, `ragged`; of some: `chosen_rows`, `sought` |
| records copied for another queue | `whole_records`, `rebuilt_records`, `record_keys` |
| properties text in a record | `properties`, `shaped_properties`; changed: `property_edits` |
| compressed body of a record | `body_codec` |
| body of an inner batch | `batch_body` |
| `consumequeue/<topic>/<queue id>/<20 digits>` | `queue_unit` |
| `consumequeue_ext/<topic>/<queue id>/<20 digits>` | `unit_ext` |
| `batchconsumequeue/<topic>/<queue id>/<20 digits>` | `batch_unit` |
| `index/<17 digits>` | `index_file`, `index_keys` |
| `checkpoint` | `checkpoint` |
| `timerlog/<20 digits>`, `timerwheel`, `config/timercheck` | `timer_log`, `timer_wheel`, `timer_check` |
| properties of a message that waits for a time | `timer_properties` |
| `abort` | `abort_file` |
| `config/*.json` | `config_json`, on top of `fastjson`; set back: `offset_limits` |
| rows that become records | `encoding`, by `message_columns`, `outgoing_bodies`, `outgoing_properties`, |
| | `routing`, `diversion`, `unique_ids`, `text_hashes`, `record_join` |
| `rmq/holder.json` | `holder_file` |
| `rmq/watermark` | `watermark`, `index_state` |
| `rmq/settings.json` | `store_settings` |
| `rmq/queues` | `queue_registry` |
| `rmq/rebuild` | `rebuild_note` |
| any JSON of ours in `rmq/` | `side_json` |
| the tags code of a unit, from its record | `tags_code`, by `delay_levels` |
| the names of all of them | `filenames` |
| message ids, as text | `message_id` |
| Java's hash of a text, host fields | `java` |

May import: rmq_spark.store.errors and .units, numpy, pyarrow, and of the standard library what touches no file,
no clock and no chance. docs/FORMAT.md has the same layouts in words; a test keeps the two alike.
"""
