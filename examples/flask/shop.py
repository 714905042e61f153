"""The tables of the shop, with SQLAlchemy; Batchwright uses the same database."""

import os
from decimal import Decimal

from sqlalchemy import create_engine, make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

engine = create_engine(make_url(os.environ["BATCHWRIGHT_DATABASE_URL"]).set(drivername="postgresql+psycopg"))


class Base(DeclarativeBase):
    pass


class Order(Base):
    """An order; its receipt is written by a job."""

    __tablename__ = "flask_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    total: Mapped[Decimal]
    receipt: Mapped[str] = mapped_column(default="")


if __name__ == "__main__":
    Base.metadata.create_all(engine)
