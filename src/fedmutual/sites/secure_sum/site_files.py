"""A site's part of the secure sums of a federation, with what it must not lose on its disk.

Nothing here is sent as it is: the files lie in the site's state folder, which its owner alone can read.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from pydantic import ValidationError

from fedmutual.core import Message
from fedmutual.errors import RunError
from fedmutual.files import read_json, write_json
from fedmutual.sites.secure_sum.identity import read_authority, read_signer
from fedmutual.sites.secure_sum.letters import WORDS, Rejected, Stage, SumContext
from fedmutual.sites.secure_sum.site import SiteRecord, SumSite
from fedmutual.sites.secure_sum.words import pack_update
from fedmutual.tensor_files import read_tensors, write_tensors

RECORD, UPDATE = "secure-sum.json", "secure-sum.safetensors"
_REPLY = "reply."


@dataclass(frozen=True)
class SumFiles:
    """The files of one site in one federation."""

    folder: Path  # the federation's at this site
    site: str
    sites: tuple[str, ...]  # all of the federation
    contract: str  # its digest, in hex
    startup: Path  # of the site's kit

    def keep_update(self, reply: Message, inbox: Message, round: int, model: str) -> None:
        """Keep the update of a round in the place of the one before. model: digest of what the server sent.

        Raises:
            ValueError: as `pack_update`.
            RunError: it cannot be written.
        """
        words = torch.from_numpy(pack_update(reply, inbox).view(np.int64))
        kept = {WORDS: words} | {_REPLY + name: tensor for name, tensor in reply.items()}
        write_tensors(self.folder / UPDATE, kept, {"format": "1", "round": str(round), "model": model})

    def read_reply(self) -> Message:
        """The last reply as it passed the privacy boundary."""
        kept = read_tensors(self.folder / UPDATE)[0] if (self.folder / UPDATE).exists() else {}
        return {name.removeprefix(_REPLY): tensor for name, tensor in kept.items() if name.startswith(_REPLY)}

    def answer(self, stage: Stage, round: int, attempt: int, order: Message) -> tuple[Message, str | None]:
        """Do a stage -> (the answer, digest of the words before they were masked, where words are sent).

        Raises:
            Rejected: the order is not to be carried out.
            RunError: a file is damaged or cannot be written.
        """
        about: Mapping[str, str] = {}
        if (self.folder / UPDATE).exists():
            kept, about = read_tensors(self.folder / UPDATE, [WORDS])
        if about.get("round") != str(round):
            raise Rejected("this site has no update of this round")
        context = SumContext(self.contract, self.sites, round, attempt, about["model"])
        part = SumSite(context, self.site, read_signer(self.startup), read_authority(self.startup), self._read_record())
        plain: str | None = None
        if stage is Stage.UPLOAD:
            words = kept[WORDS].numpy().view(np.uint64)
            plain = hashlib.sha256(words.tobytes()).hexdigest()
            answer: Message = {WORDS: torch.from_numpy(part.mask_words(order, words).view(np.int64))}
        else:
            does = {
                Stage.KEYS: part.announce_keys,
                Stage.SHARES: part.share_secrets,
                Stage.CONFIRM: part.confirm_present,
                Stage.UNMASK: part.open_secrets,
            }
            answer = does[stage](order)
        write_json(self.folder / RECORD, {"format": 1, **part.record.model_dump()})
        return answer, plain

    def _read_record(self) -> SiteRecord:
        path = self.folder / RECORD
        if not path.exists():
            return SiteRecord()
        about = {key: value for key, value in read_json(path).items() if key != "format"}
        try:
            return SiteRecord.model_validate_json(json.dumps(about))
        except ValidationError as problem:
            place = ".".join(map(str, problem.errors(include_input=False)[0]["loc"]))
            raise RunError(f"{path}: is damaged at {place}; look for a copy") from None
