"""A site's side of the secure sums of a federation, with its update and its secrets on disk.

The files lie in the state folder of the site, which only its operator can read. No file is sent.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch

from fedmutual.core import Message
from fedmutual.sites.secure_sum.fixed_point import pack_update
from fedmutual.sites.secure_sum.identity import Authority, Signer, read_authority, read_signer
from fedmutual.sites.secure_sum.messages import WORDS, Rejected, Stage, SumContext
from fedmutual.sites.secure_sum.site import SiteRecord, SumSite
from fedmutual.sites.state_files import read_state_record, write_state_record
from fedmutual.tensor_files import read_tensors, write_tensors

RECORD, UPDATE = "secure-sum.json", "secure-sum.safetensors"
_REPLY = "reply."


@dataclass(frozen=True)
class SumFiles:
    """The files of one site in one federation."""

    folder: Path  # of the federation at this site
    site: str
    sites: tuple[str, ...]  # all sites of the federation
    contract: str  # digest of the contract, in hex
    startup: Path  # the startup folder of the site's kit

    @cached_property
    def keys(self) -> tuple[Signer, Authority]:
        """The site's signing key and the authority of the kits. They are read once: a check of an RSA key takes 0.1 s.

        Raises:
            RunError: a file of the kit is missing or damaged.
        """
        return read_signer(self.startup), read_authority(self.startup)

    def write_update(self, reply: Message, inbox: Message, round: int, model: str) -> None:
        """Write the update of a round; the update of the previous round is replaced.

        model: digest of the model that the site was sent.

        Raises:
            ValueError: n_k is out of the range of a fixed-point sum.
            RunError: the file cannot be written.
        """
        words = torch.from_numpy(pack_update(reply, inbox).view(np.int64))
        tensors = {WORDS: words} | {_REPLY + name: tensor for name, tensor in reply.items()}
        write_tensors(self.folder / UPDATE, tensors, {"format": "1", "round": str(round), "model": model})

    def read_reply(self) -> Message:
        """Return the last reply as it passed the privacy boundary; {} before the first one.

        Raises:
            RunError: the file is damaged.
        """
        tensors = read_tensors(self.folder / UPDATE)[0] if (self.folder / UPDATE).exists() else {}
        return {name.removeprefix(_REPLY): tensor for name, tensor in tensors.items() if name.startswith(_REPLY)}

    def answer_stage(self, stage: Stage, round: int, attempt: int, order: Message) -> tuple[Message, str | None]:
        """Return the answer to an order, and the SHA-256 of the words before they were masked: None outside of UPLOAD.

        Raises:
            Rejected: the order is refused.
            RunError: a file is damaged or cannot be written.
        """
        metadata: Mapping[str, str] = {}
        if (self.folder / UPDATE).exists():
            tensors, metadata = read_tensors(self.folder / UPDATE, [WORDS] if stage is Stage.UPLOAD else [])
        if metadata.get("round") != str(round):
            raise Rejected("this site has no update of this round")
        context = SumContext(self.contract, self.sites, round, attempt, metadata["model"])
        sum_site = SumSite(
            context, self.site, *self.keys, read_state_record(self.folder / RECORD, SiteRecord) or SiteRecord()
        )
        unmasked_digest: str | None = None
        if stage is Stage.UPLOAD:
            words = tensors[WORDS].numpy().view(np.uint64)
            unmasked_digest = hashlib.sha256(words.tobytes()).hexdigest()
            answer: Message = {WORDS: torch.from_numpy(sum_site.mask_words(order, words).view(np.int64))}
        else:
            methods = {
                Stage.KEYS: sum_site.announce_keys,
                Stage.SHARES: sum_site.share_secrets,
                Stage.CONFIRM: sum_site.confirm_present,
                Stage.UNMASK: sum_site.open_secrets,
            }
            answer = methods[stage](order)
        write_state_record(self.folder / RECORD, sum_site.record)
        return answer, unmasked_digest
