"""The table of errors: one place in code, and the same in docs/errors.md."""

from __future__ import annotations

import re
from pathlib import Path

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2
from harness import details_of

from decodestep.accel.errors import RowError
from decodestep.service.errors import DOMAIN, REASONS, InvalidRow, MessageError, status_of

ROOT = Path(__file__).parents[2]


def test_the_page_shows_the_table() -> None:
    lines = (ROOT / "docs/errors.md").read_text().splitlines()
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")
    ]
    shown = {row[0].strip("`"): row[1:] for row in cells}
    assert shown == {
        name: [
            code_pb2.Code.Name(reason.code),
            "" if reason.retry_ms is None else f"{reason.retry_ms} ms",
            reason.help,
        ]
        for name, reason in REASONS.items()
    }


def test_every_reason_in_the_code_is_in_the_table_and_the_other_way_round() -> None:
    sources = [path for name in ("accel", "service") for path in (ROOT / name).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources if path.name != "errors.py")
    raised = set(re.findall(r'(?:RowError|MessageError|InvalidRow|refuse)\(\s*"([A-Z_]+)"', text))

    assert set(REASONS) == raised


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("kind", [MessageError, RowError])
def test_every_reason_makes_a_status(reason: str, kind: type[MessageError] | type[RowError]) -> None:
    status = status_of(kind(reason, "what happened", metadata={"kv_length": "3"}))
    info = details_of(status, error_details_pb2.ErrorInfo())
    assert (info.reason, info.domain, info.metadata["kv_length"]) == (reason, DOMAIN, "3")
    assert status.code == REASONS[reason].code and status.code in {code.value[0] for code in grpc.StatusCode}
    assert "what happened" in status.message
    delay = details_of(status, error_details_pb2.RetryInfo()).retry_delay.ToMilliseconds()
    assert delay == (REASONS[reason].retry_ms or 0)


def test_violations_become_a_bad_request() -> None:
    wrong = [("rows[0].token_ids[2]", "below 160, not 7000"), ("rows[0].sampling.top_p", "in (0, 1]")]
    for error in (
        InvalidRow("INVALID_ROW", "no", violations=wrong),
        MessageError("INVALID_MESSAGE", "no", wrong),
    ):
        found = details_of(status_of(error), error_details_pb2.BadRequest()).field_violations
        assert [(one.field, one.description) for one in found] == wrong
