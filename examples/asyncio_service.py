"""An asyncio service: rank 0 answers requests of all other ranks, and does other things meanwhile.

    rocecomm run -n 3 examples/asyncio_service.py

Every client asks for blocks of a table. The service has one task per client, and one that
ticks, all in one event loop; a client keeps several questions under way at once.
"""

import asyncio

import numpy as np

import rocecomm

QUESTION, ANSWER = 1, 1000      # message tags; an answer's tag is ANSWER + its question's number
BLOCK, BLOCKS, QUESTIONS = 65536, 16, 40


async def serve(comm, client, table):
    """Answers one client until it sends the number -1."""
    question = np.empty(2, "i8")
    served = 0
    while True:
        await comm.irecv(question, client, QUESTION)
        number, block = (int(x) for x in question)
        if number < 0:
            return served
        await comm.isend(table[block], client, ANSWER + number)
        served += 1


async def tick(times):
    while True:
        times.append(asyncio.get_running_loop().time())
        await asyncio.sleep(0.001)


async def service(comm):
    table = np.arange(BLOCKS * BLOCK, dtype="i4").reshape(BLOCKS, BLOCK)
    times = []
    ticking = asyncio.create_task(tick(times))
    served = await asyncio.gather(*(serve(comm, client, table) for client in range(1, comm.size)))
    ticking.cancel()
    print(f"served {sum(served)} questions of {comm.size - 1} clients, ticked {len(times)} times")


async def ask(comm, number, limit):
    async with limit:                                   # at most so many under way at once
        block = number % BLOCKS
        answer = np.empty(BLOCK, "i4")
        coming = comm.irecv(answer, 0, ANSWER + number)  # posted before the question leaves
        await comm.isend(np.array([number, block]), 0, QUESTION)
        nbytes = await asyncio.wait_for(coming, 60)
        assert nbytes == answer.nbytes and answer[0] == block * BLOCK
        return int(answer.sum(dtype="i8"))


async def client(comm):
    limit = asyncio.Semaphore(4)
    sums = await asyncio.gather(*(ask(comm, number, limit) for number in range(QUESTIONS)))
    await comm.isend(np.array([-1, 0]), 0, QUESTION)
    print(f"rank {comm.rank}: {len(sums)} answers, sum {sum(sums)}")


with rocecomm.init() as comm:
    asyncio.run(service(comm) if comm.rank == 0 else client(comm))
