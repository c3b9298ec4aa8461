# SPDX-License-Identifier: MIT
"""A server that streams text to many clients at once, and stops computing for one that hangs up.

Each connection has a session of its own.  Two clients read to the end, a third one goes after a few characters.
"""

import asyncio
import sys

import k3session as k3
from k3session import aio


async def main() -> int:
    ended: dict[str, str] = {}
    gone = asyncio.Event()
    async with await aio.open_model() as model:
        tokenizer = model.model.tokenizer

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            prompt = (await reader.readline()).decode()
            name = prompt.strip()

            async def stream(session: aio.AsyncSession) -> None:
                await session.prefill(tokenizer.encode(prompt))
                async for r in session.generate(200, sampling=k3.Sampling(temperature=0.8, seed=1)):
                    writer.write(r.text.encode())
                    await writer.drain()

            async with await model.session() as session:
                talk = asyncio.create_task(stream(session))
                hung_up = asyncio.create_task(reader.read())
                await asyncio.wait((talk, hung_up), return_when=asyncio.FIRST_COMPLETED)
                whole = talk.done() and talk.exception() is None
                ended[name] = "to the end" if whole else "no more for a client that has gone"
                talk.cancel()  # a pass that runs is stopped, and the session stays whole
                hung_up.cancel()
                await asyncio.gather(talk, hung_up, return_exceptions=True)
            writer.close()
            gone.set()

        async def client(name: str, characters: int = -1) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{name}\n".encode())
            text = await reader.read(characters)
            writer.close()
            return text.decode(errors="replace")

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            texts = await asyncio.gather(client("ROMEO."), client("JULIET."), client("NURSE.", 3))
            while len(ended) < 3:
                await gone.wait()
                gone.clear()
    for name, text in zip(("ROMEO.", "JULIET.", "NURSE."), texts, strict=True):
        print(f"{name} {' '.join(text.split())[:60]} [{ended[name]}]")
    return 0 if ended["NURSE."] != ended["ROMEO."] else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
