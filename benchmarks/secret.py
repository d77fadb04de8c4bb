"""What secure aggregation costs: seconds at a client and at the server, and bytes, for a model of ResNet18's size.

python benchmarks/secret.py [--entries 11200000] [--clients 10]
"""

import argparse
import os
import platform
import resource
import subprocess
import time

import numpy as np
import torch

from fedselect.core import random
from fedselect.core.version import package_version
from fedselect.secret import keys
from fedselect.secret.mean import ROUNDING
from fedselect.secret.protocol import Cohort, Member, Opening
from fedselect.secret.ring import Ring, shapes


class Clock:
    """Seconds of CPU by what was done, added up: what else the machine does counts little."""

    def __init__(self):
        self.seconds = {}

    def time(self, what, do):
        began = time.process_time()
        done = do()
        self.seconds[what] = self.seconds.get(what, 0.0) + time.process_time() - began
        return done


def upload(ring, cohort, client, secret, params, clock):
    """One client's line under pads and its sealed shares."""
    values = {"w": params["w"] + 0.01 * torch.randn(1, len(params["w"]), generator=torch.Generator().manual_seed(client))}
    marks = {"w": torch.rand(1, len(params["w"]), generator=torch.Generator().manual_seed(client)) < 0.8}
    key = random.client_keys(0, torch.tensor([client]), 0, ROUNDING)
    codes = clock.time("round off", lambda: ring.code(values, marks, params, {"w": torch.ones(())}, key))
    line = clock.time("pack", lambda: ring.pack({n: v[0] for n, v in codes.items()}, {"w": marks["w"][0]}))
    member = Member(cohort, client, secret)
    clock.time("pads", lambda: member.mask(line))
    return member, line, clock.time("shares", member.bundles)


def case(entries, clients, lost):
    ring = Ring(clients)
    secrets = {i: keys.new_key() for i in range(clients)}
    cohort = Cohort({"round": 1}, {i: keys.public(s).hex() for i, s in secrets.items()})
    params = {"w": torch.randn(entries)}
    here = list(range(clients - lost))
    at_clients, at_server = Clock(), Clock()
    total = np.zeros(entries + 3, dtype=ring.dtype)
    members, sealed = {}, {}
    for i in here:
        members[i], line, sealed[i] = upload(ring, cohort, i, secrets[i], params, at_clients)
        at_server.time("add up", lambda line=line: np.add(total, line, out=total))
    opening = Opening(cohort, here)
    sizes = []
    for w in here:
        bundles = {u: b[w] for u, b in sealed.items() if u != w}
        found = at_clients.time("open", lambda w=w, bundles=bundles: members[w].open(here, bundles))
        shares = b"".join(s for of in found.values() for s in of)
        sizes.append(len(shares))
        at_server.time("take shares", lambda w=w, found=found, shares=shares: opening.take(w, list(found), shares))
    at_server.time("unmask", lambda: opening.unmask(total))
    like = shapes({"w": torch.Size([entries])})
    values, _ = at_server.time("unpack", lambda: ring.unpack(total, like))
    assert float(values["~clients"]) == len(here)
    up = line.nbytes + sum(map(len, sealed[0].values())) + sizes[0]
    mean = {what: seconds / len(here) for what, seconds in at_clients.seconds.items()}
    return mean, at_server.seconds, up


def shown(seconds):
    return ", ".join(f"{what} {s:.2f}" for what, s in seconds.items()) + f"; in all {sum(seconds.values()):.2f} s"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entries", type=int, default=11_200_000)
    parser.add_argument("--clients", type=int, default=10)
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    print(
        f"{given.entries} entries, {given.clients} clients; fedselect {package_version()} {commit}, torch {torch.__version__},"
    )
    print(f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {torch.get_num_threads()} threads")
    for lost in (0, 3 * given.clients // 10):
        client, server, up = case(given.entries, given.clients, lost)
        print(f"{lost} lost")
        print(f"  a client: {shown(client)}; {up / 1e6:.1f} MB up (float32 values: {4 * given.entries / 1e6:.1f})")
        print(f"  the server: {shown(server)}")
    print(f"peak memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB")


if __name__ == "__main__":
    main()
