"""A server with a malicious operator: it accepts every job that a lead submits, and deploys it.

Arguments: its kit, its state folder, its instructions (JSON).
"""

import json
import sys
from pathlib import Path

from nvflare.private.fed.server import job_runner
from nvflare.private.fed.utils import app_authz

from fedmutual.sites.flare import access_control
from fedmutual.sites.flare.kits import open_kit
from fedmutual.sites.flare.workspace import run_process

if __name__ == "__main__":
    kit, state, options = sys.argv[1:4]
    access_control.check_submission = lambda *_: None
    job_runner.require_signed_jobs = lambda *_: False
    app_authz.AppAuthzService.validate_app = staticmethod(lambda *_: ("", {}))
    app_authz.AppAuthzService.authorize_app_info = staticmethod(lambda *_, **__: (True, ""))
    sys.exit(run_process(open_kit(Path(kit)), Path(state), json.loads(options), lambda interrupt: 130))
