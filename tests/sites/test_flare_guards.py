"""The methods of FLARE that the access control guards: an upgrade that moves one is noticed here, with a sentence."""

import importlib.metadata
import inspect
from pydoc import locate

import pytest

pytestmark = pytest.mark.sites

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed (the extra fedmutual[sites])")

GUARDED = {  # the path of a method -> its arguments
    "nvflare.fuel.f3.cellnet.core_cell.CoreCell._process_request": "self, origin, message",
    "nvflare.private.fed.client.admin.FedAdminAgent._dispatch_request": "self, request",
    "nvflare.private.fed.client.command_agent.CommandAgent.aux_communication": "self, request",
    "nvflare.fuel.hci.server.authz.AuthzFilter.pre_command": "self, conn, args",
    "nvflare.app_common.job_launcher.client_process_launcher.ClientProcessJobLauncher.get_command": "self, job_meta, fl_ctx",
    "nvflare.app_common.job_launcher.server_process_launcher.ServerProcessJobLauncher.get_command": "self, job_meta, fl_ctx",
}


@pytest.mark.parametrize("path", GUARDED)
def test_flare_has_each_guarded_method(path):
    method, wanted = locate(path), GUARDED[path]
    found = None if method is None else ", ".join(inspect.signature(method).parameters)
    assert found == wanted, (
        f"nvflare {importlib.metadata.version('nvflare')} has {path}({found}) instead of ({wanted}): read which method now "
        "does its work, then change sites/flare/access_control.py and this table"
    )
