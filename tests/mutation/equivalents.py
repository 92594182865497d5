"""Mutants that change nothing that anybody could see: module, kind and name of each, and why."""

_SLOW = "the quick way is not taken then, and the other way gives the same rows"
_EMPTY = "nothing has no wrong value"
_AFTER = "this value is taken, and altered, by itself"
_TYPES = "of the defaults only the types are looked at"
_ALIKE = "always the same bytes: all bits are set, or none"

EQUIVALENT: dict[tuple[str, str], str] = {
    ("store/format/record_cut.py", "read: cut_records: body_size wrong"): _SLOW,
    ("store/format/record_cut.py", "read: cut_records: reconsume_times in place of body_size"): _SLOW,
    ("store/format/record_cut.py", "read: cut_records: sys_flag wrong"): _SLOW,
    ("store/format/batch_unit.py", "byte order: module: compacted_offset"): _ALIKE,
    ("store/format/batch_unit.py", "byte order: module: reserved"): _ALIKE,
    ("store/format/batch_body.py", "byte order: module: magic"): _ALIKE,
    ("store/format/batch_body.py", "byte order: module: body_crc"): _ALIKE,
    ("store/format/config_json.py", "read: _read_file: the name dataVersion (5)"): "a word for people, in errors",
    ("store/format/watermark.py", "write: encode_slot: last_head wrong, by its key"): _AFTER,
    ("store/format/watermark.py", "read: _decode_slot: last_head wrong, by its key"): _AFTER,
    ("store/format/watermark.py", "read: _decode_slot: dirty wrong, by its key"): _AFTER,
    ("store/format/watermark.py", "read: _decode_slot: index wrong, by its key"): _AFTER,
    ("store/format/unit_ext.py", "byte order: encode_end_of_file: big"): _ALIKE,
    ("store/format/config_json.py", 'read: decode_topics_file: argument of TopicConfig 0: ""'): _TYPES,
    ("store/format/config_json.py", 'read: decode_groups_file: argument of GroupConfig 0: ""'): _TYPES,
    ("store/format/watermark.py", "constant: module: SLOT_COUNT"): "a slot that is not there counts as none",
    ("store/log/queues.py", "read: ConsumeQueue.first_from.reached: physical_offset wrong"): (
        "no two records begin a byte apart"
    ),
    ("store/format/rows.py", "write: Rows.pairs: number as bytes wrong"): _SLOW,
    ("store/format/rows.py", "byte order: Rows.pairs: big"): _SLOW,
    ("store/format/encoding.py", "read: _nothing: argument of EncodedRecords 0: np.zeros(0, np.uint8)"): _EMPTY,
    ("store/format/encoding.py", "read: _nothing: argument of EncodedRecords 1: none"): _EMPTY,
    ("store/format/encoding.py", "read: _nothing: argument of EncodedRecords 2: ()"): _EMPTY,
    ("store/format/encoding.py", "read: _nothing: argument of EncodedRecords 3: none.astype(np.int32)"): _EMPTY,
    ("store/format/encoding.py", "read: _nothing: argument of EncodedRecords 4: none"): _EMPTY,
    ("store/format/encoding.py", "read: _nothing: argument of EncodedRecords 5: none"): _EMPTY,
    ("store/format/encoding.py", "read: _nothing: argument of EncodedRecords 6: none.astype(np.int32)"): _EMPTY,
    ("store/format/encoding.py", "write: MessageEncoder._encode: argument of RecordParts 0: self._head_at(born_ms)"): (
        "the size of the body alone is wrong in it, and each record gets its own"
    ),
}
