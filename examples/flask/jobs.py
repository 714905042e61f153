"""The operations of the shop: `batchwright worker jobs.py`."""

from shop import Order, engine
from sqlalchemy.orm import Session

from batchwright import operation


@operation("write_receipt")
def write_receipt(order_id: int) -> str:
    """A plain function runs in a thread, so a blocking session is fine."""
    with Session(engine) as session, session.begin():
        order = session.get_one(Order, order_id)
        order.receipt = f"{order.email} paid {order.total}"
        return order.receipt
