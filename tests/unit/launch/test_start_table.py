"""The start-up table, as a reader sees it and as a machine does."""

import logging

from trimaran.launch.start_table import ProcessStart, log_start, start_table

STARTS = [
    ProcessStart("supervisor", 0.0, [("starting", 0.5), ("locating the model", 0.25)]),
    ProcessStart("api-0", 0.5, [("importing", 1.0), ("connecting", 2.5)]),
    ProcessStart("engine-0", 0.75, [("loading", 3.0), ("KV cache", 0.001)]),
]


def test_the_table():
    # 32 places for 4 s: eight a second.
    assert start_table(STARTS, 4.0).splitlines() == [
        "  supervisor  starting              0.50 s   12 %  ━━━━",
        "              locating the model    0.25 s    6 %      ━━",
        "  api-0       importing             1.00 s   25 %      ━━━━━━━━",
        "              connecting            2.50 s   62 %              ━━━━━━━━━━━━━━━━━━━━",
        "  engine-0    loading               3.00 s   75 %        ━━━━━━━━━━━━━━━━━━━━━━━━",
        "              KV cache              0.00 s    0 %                                ╸",
        "  total                             4.00 s",
    ]


def test_no_bar_leaves_the_frame():
    late = [ProcessStart("engine-0", -1.0, [("loading", 9.0), ("warming up", 1.0)])]
    for line in start_table(late, 4.0).splitlines():
        assert len(line.rstrip("━╸").rstrip()) <= len(line) <= 80


def test_one_record_for_text_and_json(caplog):
    caplog.set_level(logging.INFO)
    log_start(logging.getLogger("trimaran.x"), "start-up:", STARTS, 4.0)
    [record] = caplog.records
    assert record.getMessage() == "start-up:"
    assert record.block == start_table(STARTS, 4.0)
    assert record.fields == {
        "phases": {
            "supervisor": {"starting": 0.5, "locating the model": 0.25},
            "api-0": {"importing": 1.0, "connecting": 2.5},
            "engine-0": {"loading": 3.0, "KV cache": 0.001},
            "total": 4.0,
        }
    }
