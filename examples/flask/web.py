"""The pages of the shop: `flask --app web run`."""

from decimal import Decimal
from functools import cache

from flask import Flask, Response, abort, jsonify, request
from jobs import write_receipt
from shop import Order, engine
from sqlalchemy.orm import Session

from batchwright import Batchwright

app = Flask(__name__)


@cache
def batchwright() -> Batchwright:
    """One client per process, opened on first use: a server that forks must not open one before it forks."""
    return Batchwright().open()


class Declined(Exception):
    """The bank declines the payment."""


@app.post("/orders")
def create_order() -> tuple[Response, int]:
    """Store the order and its job in one transaction: either both exist after it, or neither."""
    data = request.get_json(force=True)
    try:
        with Session(engine) as session, session.begin():
            order = Order(email=data["email"], total=Decimal(str(data["total"])))
            session.add(order)
            session.flush()  # now it has an id
            job = batchwright().enqueue(write_receipt, {"order_id": order.id}, connection=session)
            charge(order)
            return jsonify(order=order.id, job=str(job)), 201
    except Declined as error:
        return jsonify(error=str(error)), 402


@app.get("/orders/<int:id>")
def show_order(id: int) -> Response:
    with Session(engine) as session:
        order = session.get(Order, id) or abort(404)
        return jsonify(order=order.id, receipt=order.receipt)


def charge(order: Order) -> None:
    if order.total > 1000:
        raise Declined(f"{order.total} is more than the card allows")
