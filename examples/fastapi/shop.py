"""The tables of the shop, with SQLAlchemy; Batchwright uses the same database."""

import asyncio
import os
from decimal import Decimal

from sqlalchemy import make_url
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

engine = create_async_engine(make_url(os.environ["BATCHWRIGHT_DATABASE_URL"]).set(drivername="postgresql+psycopg"))
open_session = async_sessionmaker(engine)


class Base(DeclarativeBase):
    pass


class Order(Base):
    """An order; its receipt is written by a job."""

    __tablename__ = "fastapi_order"
    id: Mapped[int] = mapped_column(primary_key=True)
    email: Mapped[str]
    total: Mapped[Decimal]
    receipt: Mapped[str] = mapped_column(default="")


async def create_tables() -> None:
    async with engine.begin() as connection:
        await connection.run_sync(Base.metadata.create_all)
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(create_tables())
