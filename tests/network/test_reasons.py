"""What of Flower's failed is said in words that help."""

import pytest

from fedselect.network.flower import reasons

NOTES = "\x1b[92mINFO \x1b[0m:      Starting Flower SuperNode\nINFO:     Started server process [7]\n"


@pytest.mark.parametrize(
    ("output", "said"),
    [
        ('{\n  "success": false,\n  "error-message": "Run failed.\\nNo such app"\n}\n', "Run failed. No such app"),
        ('Loading {x}\n{\n  "success": false,\n  "error-message": "no"\n}\n', "no"),
        ("INFO: Received successfully\n}\n", "it did not say why"),
        ("Error: the app is too large\nINFO: Received successfully\n", "Error: the app is too large"),
        ("2026-01-01T00:00:00.1Z INFO [uvicorn.access] GET\n\x1b[91mERROR \x1b[0m: it fell\n", "ERROR : it fell"),
        ("", "it did not say why"),
    ],
)
def test_a_command_that_failed(output, said):
    assert reasons.of_command(output) == said


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (NOTES + "Exit Code: 302\nThe key is invalid.\nFor more information, see x", "302 The key is invalid. (code 3;"),
        (NOTES + "Received successfully\nExit Code: 1\nold\n" + NOTES, "compare the clocks of both machines (code 3;"),
        (NOTES + "\x1b[91mERROR \x1b[0m: no space left\nINFO: Received successfully\n", "ERROR : no space left (code 3;"),
        ("Starting Flower SuperLink\nINFO: bye\n", "it did not say why (code 3;"),
    ],
)
def test_a_process_that_ended(tmp_path, log, said):
    (tmp_path / "log.txt").write_text(log)
    assert said in reasons.of_log(tmp_path / "log.txt", 3)


def test_a_process_that_was_killed(tmp_path):
    (tmp_path / "log.txt").write_text(NOTES + "WARNING: slow\n")
    assert reasons.of_log(tmp_path / "log.txt", -9).startswith("it was killed by signal 9 (code -9;")


@pytest.mark.parametrize(
    ("code", "reason", "said"),
    [
        (2, "ValueError: x", "raised an error: ValueError: x"),
        (3, "The sender may not have completed the upload before ...", "was cut off while it sent its reply"),
        (3, "The requested message could not be found", "got no message within its time-out; if that happens again, raise"),
        (5, "no heartbeat", "is disconnected"),
        (6, "a mod said no", "failed: a mod said no (Flower's code 6)"),
        (99, "", "failed (Flower's code 99)"),
    ],
)
def test_a_node_that_did_not_reply(code, reason, said):
    assert reasons.of_error(code, reason).startswith(said)


def test_a_helper_that_starts_late_does_not_hide_why_a_node_was_turned_away(tmp_path):
    log = tmp_path / "log.txt"
    log.write_text(
        "INFO : Starting Flower SuperNode\nERROR: Exit Code: 305\n[code: 2004] Failed to activate SuperNode.\n"
        "For more information, visit\nINFO : Starting Flower SuperExec\n"
    )
    assert reasons.turned_away(log)
    assert "does not know this client's node.key" in reasons.of_log(log, 1)
    log.write_text(log.read_text() + "INFO : Starting Flower SuperNode\nall is well\n")
    assert not reasons.turned_away(log)
