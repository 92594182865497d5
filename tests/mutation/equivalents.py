"""Equivalent mutants, which no test can notice: module, kind and name of each, and why."""

_SLOW = "the code then takes the slow path, which gives the same rows"
_AFTER = "another mutant alters this value on its own"
_TYPES = "only the types of the defaults are used"
_ALIKE = "always the same bytes: all bits are set, or none"

EQUIVALENT: dict[tuple[str, str], str] = {
    ("store/format/rows.py", "read: cut_records: body_size wrong"): _SLOW,
    ("store/format/rows.py", "read: cut_records: reconsume_times in place of body_size"): _SLOW,
    ("store/format/rows.py", "read: cut_records: sys_flag wrong"): _SLOW,
    ("store/format/consume_queue_entry.py", "byte order: module: compacted_offset"): _ALIKE,
    ("store/format/consume_queue_entry.py", "byte order: module: reserved"): _ALIKE,
    ("store/format/consume_queue_entry.py", "byte order: module: magic"): _ALIKE,
    ("store/format/consume_queue_entry.py", "byte order: module: body_crc"): _ALIKE,
    ("store/format/config_json.py", "read: _read_file: the name dataVersion (5)"): "a word for people, in errors",
    ("store/format/own_files.py", "write: encode_slot: last_head wrong, by its key"): _AFTER,
    ("store/format/own_files.py", "read: _decode_slot: last_head wrong, by its key"): _AFTER,
    ("store/format/own_files.py", "read: _decode_slot: dirty wrong, by its key"): _AFTER,
    ("store/format/own_files.py", "read: _decode_slot: index wrong, by its key"): _AFTER,
    ("store/format/consume_queue_entry.py", "byte order: encode_end_of_file: big"): _ALIKE,
    ("store/format/config_json.py", 'read: decode_topics_file: argument of TopicConfig 0: ""'): _TYPES,
    ("store/format/config_json.py", 'read: decode_groups_file: argument of GroupConfig 0: ""'): _TYPES,
    ("store/format/own_files.py", "constant: module: SLOT_COUNT"): "a missing slot counts as empty",
    ("store/log/consume_queue.py", "read: ConsumeQueue.first_from.reached: physical_offset wrong"): (
        "no two records begin a byte apart"
    ),
    ("store/format/rows.py", "write: Rows.pairs: number as bytes wrong"): _SLOW,
    ("store/format/rows.py", "byte order: Rows.pairs: big"): _SLOW,
    (
        "store/format/message_encoder.py",
        "write: MessageEncoder._encode: argument of RecordParts 0: head",
    ): ("only its size of the body is wrong, and each record gets its own size"),
}
