"""What the honest client has done."""

from batchwright import operation


@operation("siege.echo")
async def echo(value: int) -> int:
    return value
