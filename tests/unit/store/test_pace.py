from __future__ import annotations

import asyncio

from objckpt.store.pace import Pace


def test_the_limit_holds_halves_and_recovers() -> None:
    async def scenario() -> None:
        pace, running, most = Pace(8), 0, 0

        async def work() -> None:
            nonlocal running, most
            async with pace.slot():
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1

        await asyncio.gather(*(work() for _ in range(50)))
        assert most == 8
        pace.throttled()
        assert pace.limit == 4
        most = 0
        await asyncio.gather(*(work() for _ in range(50)))
        assert most == 4
        for _ in range(100):
            pace.succeeded()
        assert pace.limit == 8

    asyncio.run(scenario())


def test_one_burst_of_refusals_halves_once() -> None:
    async def scenario() -> None:
        pace = Pace(8)

        async def refused() -> None:
            async with pace.slot():
                await asyncio.sleep(0)
                pace.throttled()

        await asyncio.gather(*(refused() for _ in range(8)))
        assert pace.limit == 4

    asyncio.run(scenario())


def test_a_cancelled_waiter_passes_its_place_on() -> None:
    async def scenario() -> None:
        pace = Pace(1)

        async def hold() -> None:
            async with pace.slot():
                pass

        async with pace.slot():
            waiters = [asyncio.create_task(hold()) for _ in range(3)]
            await asyncio.sleep(0)
            waiters[0].cancel()
        waiters[1].cancel()
        await asyncio.wait_for(asyncio.gather(*waiters, return_exceptions=True), 5)

    asyncio.run(scenario())
