"""Looks for a random program that fails, and shortens it."""

import os
import random
import time

from differential.execute import Mismatch
from differential.raw import configs, raw_programs
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed

SEED = int(os.environ.get("ROCECOMM_TEST_SEED") or random.SystemRandom().randrange(2**32))


def shortened(config, raw, one, seconds):
    """The shortest failing program that leaving out raw operations gives within a time, as text."""
    text, end, size = None, time.monotonic() + seconds, len(raw)
    while size:
        at = 0
        while at < len(raw) and (text is None or time.monotonic() < end):
            fewer = raw[:at] + raw[at + size:] if text else raw
            try:
                one(config, fewer)
                at += size
            except Mismatch as error:
                text, raw = str(error), fewer
        size = min(size, len(raw)) // 2
    return text


def search(examples, one, shorten_for=0.0, seed=SEED):
    """Runs one(config, raw) on that many random programs."""
    failed = []

    @hypothesis_seed(seed)
    @settings(max_examples=examples, database=None, deadline=None, print_blob=False,
              phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(configs, raw_programs)
    def check(config, raw):
        if not failed:
            try:
                one(config, raw)
                return
            except Mismatch as error:
                failed.append((config, raw, error))
        raise failed[0][2]

    try:
        check()
    except Mismatch as error:
        text = shortened(*failed[0][:2], one, shorten_for) or f"{error}\n(it did not happen again)"
        raise Mismatch(f"{text}\n\nreplay with ROCECOMM_TEST_SEED={seed} "
                       f"ROCECOMM_TEST_PROGRAMS={examples}") from None


def search_seeds(examples, make_world, one, shorten_for=0.0, seed=SEED, length=60):
    """Runs one(world, raw) on that many random worlds, each with a raw program: a list of
    numbers, of which each is the seed of one operation."""
    for number in range(examples):
        rng = random.Random(f"{seed}.{number}")
        world, raw = make_world(rng), [rng.getrandbits(48) for _ in range(rng.randint(length // 4, length))]
        try:
            one(world, raw)
        except Mismatch as error:
            text = shortened(world, raw, one, shorten_for) or f"{error}\n(it did not happen again)"
            raise Mismatch(f"{text}\n\nreplay with ROCECOMM_TEST_SEED={seed} "
                           f"ROCECOMM_TEST_PROGRAMS={examples} (it was number {number})") from None
