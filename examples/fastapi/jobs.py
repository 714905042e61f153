"""The operations of the shop: `batchwright worker jobs.py`."""

from shop import Order, open_session

from batchwright import operation


@operation("write_receipt")
async def write_receipt(order_id: int) -> str:
    async with open_session() as session, session.begin():
        order = await session.get_one(Order, order_id)
        order.receipt = f"{order.email} paid {order.total}"
        return order.receipt
