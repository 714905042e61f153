"""The operation of the honest client's jobs."""

from batchwright import operation


@operation("siege.echo")
async def echo(value: int) -> int:
    return value
