"""Build nodes of FedH2L and similar methods: their own rows, one public set, and the relay's first state."""

import torch

from fedmutual.algorithms.peers import make_agreed_state
from fedmutual.core import Client, Seeds
from toy import Rows, federation, mlp

LR = 0.1


def seeds(public, owners, labelled=True, classes=3):
    about = {"digest": torch.zeros(32, dtype=torch.uint8), "rows": torch.tensor(len(public))}
    return Seeds(owners, about | ({"counts": torch.bincount(public.y, minlength=classes)} if labelled else {}))


def node(id, owners, public, own_rows, net, optimizer=None, trains_on=None, labelled=True):
    """Return a node: its own rows, the public rows of all nodes, and its local data, by default both."""
    private = trains_on or Rows(torch.cat([own_rows.x, public.x]), torch.cat([own_rows.y, public.y]))
    about, own_optimizer = seeds(public, owners, labelled), optimizer or torch.optim.SGD(net.parameters(), lr=0.0)
    return Client(
        id, {"personal": net}, {"personal": own_optimizer}, {"private": private, "public": public}, LR, seeds=about
    )


def noise(seed, n):
    x = torch.randn(n, 6, generator=torch.Generator().manual_seed(seed))
    return Rows(x, x[:, :3].argmax(1))


def nodes(count=4, each=8, net=mlp, optimizer=None, labelled=True):
    """Return nodes with different rows and nets."""
    public, owners = noise(99, count * each), {str(i): range(i * each, (i + 1) * each) for i in range(count)}
    nets = [net(100 + i) for i in range(count)]
    return [
        node(str(i), owners, public, noise(i, 20), nets[i], optimizer and optimizer(nets[i].parameters()), labelled=labelled)
        for i in range(count)
    ]


def run(algorithm, clients, **given):
    start = make_agreed_state(clients[0].seeds.owners, 3)
    return federation(algorithm, clients, start=start, **given)
