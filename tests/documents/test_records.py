"""Records of stored documents: what a file of them survives, and what it refuses."""

import os
import random
import signal
import sqlite3
import subprocess
import sys

import pytest

from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, RecordsError, Scope
from chunkattn.errors import ConfigError

SCOPE = Scope("ana", "salt")
PREFIXES = [
    Prefix("Read the notes."),
    Prefix([5, 2**31 - 1]),
    Prefix([{"role": "system", "content": "Lone \ud800 surrogate."}], is_chat=True, template_options={"thinking": False}),
    Prefix([], is_chat=True),
    Prefix([]),
]
WRITER = """
import sys
from chunkattn.documents.records import DocumentRecord, DocumentRecords, Prefix, Scope
records = DocumentRecords(sys.argv[1])
print("open", flush=True)
for number, line in enumerate(sys.stdin):
    made = [DocumentRecord(Scope(), f"{number}-{n}", Prefix("Read."), line) for n in range(3)]
    records.put(made)
    if number % 3 == 2:
        records.remove(made)
    print(number, flush=True)
"""


def record(name, document="A text.", **fields):
    return DocumentRecord(**{"scope": SCOPE, "id": name, "prefix": PREFIXES[0], "document": document, **fields})


def put(records, *made):
    """Put records, and return them."""
    records.put(made)
    return made


def plain(found):
    """All that a record says, for comparisons."""
    prefix = found.prefix.source, found.prefix.is_chat, found.prefix.template_options
    flags = found.pinned, found.keep_states, found.cite_as
    rest = found.created, found.expires, found.tokens, found.prefix_tokens, found.num_bytes
    return found.scope, found.id, prefix, found.source, flags, rest


def test_a_new_process_has_every_field(tmp_path):
    records = DocumentRecords(tmp_path / "documents")
    made = [
        record(
            f"doc-{n}",
            document,
            scope=Scope(owner, salt),
            prefix=prefix,
            expires=2e9 + n,
            pinned=n % 2 == 1,
            keep_states=n % 3 == 1,
            cite_as=("id", None, "")[n % 3],
            tokens=n,
        )
        for n, (prefix, document, owner, salt) in enumerate(
            (prefix, document, owner, salt)
            for prefix in PREFIXES
            for document in ("Ein Text. \ud800 \x00", [1, 2, 3])
            for owner, salt in ((None, None), ("", None), (None, ""))
        )
    ]
    records.put(made)
    records.change(records.get(made[4].scope, "doc-4"), pinned=True, expires=None, prefix_tokens=7, num_bytes=2**40)
    assert (made[4].pinned, made[4].expires, made[4].prefix_tokens, made[4].num_bytes) == (True, None, 7, 2**40)
    records.close()
    again = DocumentRecords(tmp_path / "documents")
    for own in made:
        assert plain(again.get(own.scope, own.id)) == plain(own)
    assert len(again) == len(made)
    assert again.count("") == 10
    assert again.get(Scope(None, ""), "doc-0") is None
    again.close()


def test_random_changes_against_a_dictionary(tmp_path):
    rng, model = random.Random(0), {}
    records = DocumentRecords(tmp_path / "documents")
    for step in range(400):
        key = Scope(None, rng.choice("ab")), str(rng.randrange(12))
        match rng.randrange(5):
            case 0 | 1:
                new = [
                    record(key[1], f"{step}", scope=key[0], prefix=rng.choice(PREFIXES)),
                    record("x", f"{step}", scope=key[0]),
                ]
                for own in put(records, *new):
                    model.pop((own.scope, own.id), None)
                    model[own.scope, own.id] = plain(own)
            case 2 if key in model:
                records.change(records.get(*key), pinned=rng.random() < 0.5, expires=3e9 + step)
                model[key] = plain(records.get(*key))
            case 3 if key in model:
                records.remove([records.get(*key)])
                del model[key]
            case 4 if step % 20 == 4:
                records.close()
                records = DocumentRecords(tmp_path / "documents")
        for salt in "ab":
            scope = Scope(None, salt)
            own = [name for at, name in model if at == scope]
            after = rng.choice([None, *own])
            start = 0 if after is None else own.index(after) + 1
            found, more = records.page(scope, after, 3)
            assert [plain(r) for r in found] == [model[scope, name] for name in own[start : start + 3]]
            assert more == (len(own) > start + 3)
        assert records.count(None) == len(records) == len(model)
    end = 3e9 + 300
    assert {r.id for r in records.expired(end)} == {name for (_, name), own in model.items() if (own[4][1] or 4e9) <= end}
    records.remove(records)
    records.close()
    with sqlite3.connect(tmp_path / "documents") as file:
        assert list(file.execute("SELECT count(*) FROM prefixes")) == [(0,)]
    file.close()


def test_what_returned_survives_a_kill_and_frees_the_file(tmp_path):
    path = tmp_path / "documents"
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "open\n"
    with pytest.raises(ConfigError, match="in use by another process"):
        DocumentRecords(path)
    for number in range(20):
        process.stdin.write(f"text of {number}\n")
        process.stdin.flush()
        assert process.stdout.readline() == f"{number}\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close()
    process.stdout.close()
    records = DocumentRecords(path)
    assert {r.id: r.source for r in records} == {
        f"{n}-{i}": f"text of {n}\n" for n in range(20) if n % 3 != 2 for i in range(3)
    }
    with pytest.raises(ConfigError, match="in use by another process"):
        DocumentRecords(path)
    records.close()


def foreign(path):
    with sqlite3.connect(path) as file:
        file.execute("CREATE TABLE notes (text TEXT)")
    file.close()


def newer(path):
    DocumentRecords(path).close()
    with sqlite3.connect(path) as file:
        file.execute("PRAGMA user_version = 99")
    file.close()


def scrambled(path):
    records = DocumentRecords(path)
    records.put([record(str(n), "text " * 500) for n in range(50)])
    records.close()
    content = bytearray(path.read_bytes())
    content[8192:] = random.Random(1).randbytes(len(content) - 8192)
    path.write_bytes(content)


def unreadable_row(path):
    records = DocumentRecords(path)
    records.put([record("a")])
    records.close()
    with sqlite3.connect(path) as file:
        file.execute("UPDATE documents SET document = CAST('{' AS BLOB)")
    file.close()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (foreign, "another program"),
        (newer, "version 99"),
        (scrambled, "is damaged"),
        (unreadable_row, "is damaged"),
        (lambda path: path.write_text("ana:a\n" * 99), "another kind, or damaged"),
        (os.mkfifo, "not a regular file"),
    ],
)
def test_other_files_are_refused_and_stay_as_they_are(tmp_path, spoil, message):
    path = tmp_path / "documents"
    spoil(path)
    before = path.read_bytes() if path.is_file() else None
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            DocumentRecords(path)
    assert before is None or path.read_bytes() == before
    with pytest.raises(ConfigError, match="folder must exist"):
        DocumentRecords(tmp_path / "absent" / "documents")


def test_a_change_that_the_file_does_not_take_changes_nothing(tmp_path):
    records = DocumentRecords(tmp_path / "documents")
    (kept,) = put(records, record("a"))
    ((pages,),) = records._file.rows.execute("PRAGMA page_count")
    records._file.rows.execute(f"PRAGMA max_page_count = {pages + 2}")  # SQLite answers as on a full disk
    for _ in range(2):
        with pytest.raises(RecordsError, match="full"):
            records.put([record("b"), record("a", "long " * 9000)])
        assert records.get(SCOPE, "a") is kept
        assert len(records) == 1
    records.change(kept, pinned=True)
    records.close()
    (kept,) = DocumentRecords(tmp_path / "documents")
    assert kept.pinned
    assert kept.source == "A text."


@pytest.mark.parametrize(("taken", "outcome"), [(0, "nothing was changed"), (1, "only a part was deleted; try again")])
def test_a_deletion_in_portions_says_what_was_deleted(taken, outcome, tmp_path, monkeypatch):
    """The portions are both records, then each alone."""
    records = DocumentRecords(tmp_path / "documents")
    kept, done = put(records, record("a"), record("b")), []
    delete = records._file._delete_rows

    def full(portion, **options):
        if len(portion) > 1 or len(done) == taken:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorname = "SQLITE_FULL"
            raise error
        delete(portion)
        done.append(portion)

    monkeypatch.setattr(records._file, "_delete_rows", full)
    with pytest.raises(RecordsError, match=f"is full; {outcome}$"):
        records.remove(kept)
    assert len(records) == 2 - taken
    records.close()


def test_after_a_handover_another_opens_the_file_and_changes_are_refused(tmp_path):
    former = DocumentRecords(tmp_path / "records")
    (first,) = put(former, record("first"))
    former.hand_over()
    new = DocumentRecords(tmp_path / "records")
    try:
        for change in (lambda: former.put([record("second")]), lambda: former.remove([first])):
            with pytest.raises(RecordsError, match="in use by a new process"):
                change()
        assert former.get(SCOPE, "first") is first
        assert [found.id for found in new] == ["first"]
        new.put([record("second")])
    finally:
        former.close()
        new.close()


def test_records_without_a_file_are_in_memory():
    records = DocumentRecords()
    records.remove(put(records, record("a"), record("b", [5]))[:1])
    assert [(r.id, r.source) for r in records] == [("b", [5])]


def test_what_is_owed_survives_until_it_is_settled(tmp_path):
    path = tmp_path / "documents"
    records = DocumentRecords(path)
    a, b, c = put(records, *(record(name, f"Text of {name}. \ud800", prefix=PREFIXES[2]) for name in "abc"))
    records.put([replaced := record("c", [1, 2])])
    records.remove([a, b])
    assert list(records.owed) == [c, a, b]
    records.settle(a, ["second"])
    records.settle(b)
    records.close()
    for _ in range(2):
        records = DocumentRecords(path)
        owed = {(r.id, r.source, r.prefix.source[0]["content"]): [*places] for r, places in records.owed.items()}
        text = PREFIXES[2].content[0]["content"]
        assert owed == {("a", a.source, text): ["second"], ("c", c.source, text): []}
        assert [plain(r) for r in records] == [plain(replaced)]
        records.close()
    records = DocumentRecords(path)
    for own in list(records.owed):
        records.settle(own)
    records.settle(replaced)  # not owed
    records.close()
    records = DocumentRecords(path)
    assert (len(records), records.owed) == (1, {})
    records.close()


@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_file_of_a_former_version_is_read(version, tmp_path):
    path = tmp_path / "documents"
    records = DocumentRecords(path)
    (kept,) = put(records, record("doc-of-a-former-rule"))
    records.close()
    with sqlite3.connect(path) as file:
        if version < 3:
            file.execute("ALTER TABLE documents DROP COLUMN keep_states")
        if version == 1:
            file.execute("DROP TABLE owed")
        file.execute(f"PRAGMA user_version = {version}")
    file.close()
    for _ in range(2):
        records = DocumentRecords(path)
        assert [plain(r) for r in records] == [plain(kept)]
        records.close()
    records = DocumentRecords(path)
    records.remove(records)
    assert [r.id for r in records.owed] == ["doc-of-a-former-rule"]
    records.close()
