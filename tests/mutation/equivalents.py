"""Mutants that change nothing that anybody could see: module and name of each, and why."""

_CUT = "the quick way is not taken then, and the other way gives the same rows"

EQUIVALENT: dict[tuple[str, str], str] = {
    ("store/format/record_cut.py", "cut_records: body_size wrong"): _CUT,
    ("store/format/record_cut.py", "cut_records: reconsume_times in place of body_size"): _CUT,
    ("store/format/record_cut.py", "cut_records: sys_flag wrong"): _CUT,
}
