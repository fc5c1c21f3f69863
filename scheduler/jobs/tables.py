"""The tables. Times are whole seconds since 1970, texts that hold JSON are ASCII."""

from typing import Final

from sqlalchemy import BigInteger, ForeignKey, Index, Integer, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

SCHEMA_VERSION: Final = 1

Serial = BigInteger().with_variant(Integer, "sqlite")
"""A key that counts up; SQLite counts only what it calls INTEGER."""


class Base(DeclarativeBase):
    type_annotation_map = {int: BigInteger, str: Text}  # noqa: RUF012  (SQLAlchemy reads it so)


class Schema(Base):
    """One row: the version of these tables."""

    __tablename__ = "bishop_schema"
    version: Mapped[int] = mapped_column(primary_key=True)


class Worker(Base):
    """A server that may hold leases. Who sees `beat` stand still long enough takes them over."""

    __tablename__ = "bishop_workers"
    id: Mapped[str] = mapped_column(primary_key=True)
    beat: Mapped[int] = mapped_column(default=0)


class File(Base):
    """state: "writing" (by `worker`), "ready", or "deleted" (its content may still be there)."""

    __tablename__ = "bishop_files"
    seq: Mapped[int] = mapped_column(Serial, primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    tenant: Mapped[str]
    purpose: Mapped[str]
    filename: Mapped[str]
    state: Mapped[str]
    worker: Mapped[str | None]
    bytes: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[int]
    expires_at: Mapped[int | None]
    __table_args__ = (Index("bishop_files_of_tenant", "tenant", "seq"),)


class Batch(Base):
    """status: as OpenAI's API names it. ending: "cancelled" or "expired" once that is decided,
    while unfinished lines and result files are dealt with. worker: who validates or finalizes it.

    defaults: JSON, what lines get that do not say it. output_seconds: life of the result files.
    """

    __tablename__ = "bishop_batches"
    seq: Mapped[int] = mapped_column(Serial, primary_key=True)
    id: Mapped[str] = mapped_column(unique=True)
    tenant: Mapped[str]
    model: Mapped[str]
    endpoint: Mapped[str]
    completion_window: Mapped[str]
    input_file_id: Mapped[str]
    status: Mapped[str] = mapped_column(index=True)
    ending: Mapped[str | None]
    worker: Mapped[str | None]
    defaults: Mapped[str]
    labels: Mapped[str | None]
    errors: Mapped[str | None]
    output_seconds: Mapped[int]
    output_file_id: Mapped[str | None]
    error_file_id: Mapped[str | None]
    total: Mapped[int] = mapped_column(default=0)
    completed: Mapped[int] = mapped_column(default=0)
    failed: Mapped[int] = mapped_column(default=0)
    created_at: Mapped[int]
    expires_at: Mapped[int]
    in_progress_at: Mapped[int | None]
    finalizing_at: Mapped[int | None]
    completed_at: Mapped[int | None]
    failed_at: Mapped[int | None]
    expired_at: Mapped[int | None]
    cancelling_at: Mapped[int | None]
    cancelled_at: Mapped[int | None]
    __table_args__ = (Index("bishop_batches_of_tenant", "tenant", "seq"),)


class Line(Base):
    """One request of a batch, `number` counted from 1 as in the input file.

    state: "pending", "running" (by `worker`, under `token`) or "done". outcome: "completed" or
    "failed". The record of a done line lies in storage under its token, with `bytes` and `digest`;
    without a token, `code` says why it never ran. seed: of a line that names none.
    """

    __tablename__ = "bishop_lines"
    batch: Mapped[int] = mapped_column(
        ForeignKey("bishop_batches.seq", ondelete="CASCADE"), primary_key=True
    )
    number: Mapped[int] = mapped_column(primary_key=True)
    custom_id: Mapped[str]
    body: Mapped[str]
    seed: Mapped[int]
    state: Mapped[str] = mapped_column(default="pending")
    worker: Mapped[str | None] = mapped_column(index=True)
    token: Mapped[str | None]
    outcome: Mapped[str | None]
    code: Mapped[str | None]
    bytes: Mapped[int | None]
    digest: Mapped[str | None]
    __table_args__ = (
        UniqueConstraint("batch", "custom_id"),
        Index("bishop_lines_by_state", "batch", "state", "number"),
    )
