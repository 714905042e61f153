"""The operations of the shop: `batchwright worker shop.jobs`. A worker is not a Django command, so we set up Django."""

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "shop.settings")
django.setup()

from django.db import close_old_connections  # noqa: E402

from batchwright import operation  # noqa: E402
from shop.models import Order  # noqa: E402


@operation("write_receipt")
def write_receipt(order_id: int) -> str:
    """A plain function runs in a thread, where Django's models work as in a view."""
    close_old_connections()  # as Django does before each request: reopen a connection that the server closed
    order = Order.objects.get(pk=order_id)
    order.receipt = f"{order.email} paid {order.total}"
    order.save(update_fields=["receipt"])
    return order.receipt
