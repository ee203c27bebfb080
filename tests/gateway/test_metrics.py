"""One scrape of the gateway and its replicas, read by Prometheus's own parser."""

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from chunkattn.gateway.metrics import merge
from tests.gateway.rig import COMPLETE, Replica, ask, rig, run

ODD = 'a "quoted" \\ value, b="c"} 1 \u2028 \x85 \x0b\nnext'


def samples(text):
    """Return value by name and labels of all samples, none of which may come twice."""
    listed = [s for family in text_string_to_metric_families(text) for s in family.samples]
    found = {(s.name, frozenset(s.labels.items())): s.value for s in listed}
    assert len(found) == len(listed)
    return found


def labelled(text, name, **more):
    """Return the samples that a text should become."""
    return {(key, labels | {("replica", name), *more.items()}): value for (key, labels), value in samples(text).items()}


def one(seed):
    """Return metrics of all kinds."""
    registry = CollectorRegistry()
    Counter("requests", "Requests\nof all", ["route"], registry=registry).labels(ODD).inc(seed)
    Gauge("plain", "No labels", registry=registry).set(seed / 3)
    seconds = Histogram("seconds", 'Times "so"', ["route"], buckets=(0.1, 1), registry=registry)
    seconds.labels("/x").observe(seed)
    seconds.labels("{}").observe(0.01)
    Gauge("infinite", "", registry=registry).set(float("inf"))
    return generate_latest(registry).decode()


def test_every_sample_has_its_replica():
    own, texts = one(3), {"http://a:1": one(1), 'odd "name" \\': one(2)}
    merged = merge(own, texts)
    wanted = labelled(own, "gateway")
    for name, text in texts.items():
        wanted |= labelled(text, name)
    assert samples(merged) == wanted
    kinds = [line for line in merged.split("\n") if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds)), "a family is described twice"


@pytest.mark.parametrize("name", ["replica", "exported_replica"])
def test_a_label_of_that_name(name):
    text = f'# TYPE x gauge\nx{{{name}="inner",other="replica=\\"no\\""}} 1\ny{{a="replica=1",}} 2\n'
    own, theirs = samples(merge(text, {})), samples(merge("", {"r": text}))
    other = ("other", 'replica="no"')
    kept = {("replica", "inner")} if name == "replica" else {("replica", "gateway"), (name, "inner")}
    assert own["x", frozenset({other, *kept})] == 1
    assert theirs["x", frozenset({("replica", "r"), ("exported_replica", "inner"), other})] == 1
    assert theirs["y", frozenset({("replica", "r"), ("a", "replica=1")})] == 2


def test_texts_of_other_writers():
    """Samples without a description, with a timestamp, with blanks, and lines of other formats."""
    text = 'bare 1\nspaced { a = "b" } 2\nstamped{a="b"} 3 1700000000000\n# note\n\n#TYPE x gauge\nx\t4\nnot a sample{\n# EOF\n'
    found = samples(merge("# HELP own Own\n# TYPE own counter\nown_total 1\n", {"r": text}))
    assert {(name, value) for (name, _), value in found.items()} >= {("bare", 1), ("stamped", 3), ("x", 4), ("own_total", 1)}
    assert all(("replica", "r") in labels for (name, labels) in found if name != "own_total")


def test_families_of_one_name_stand_together():
    merged = merge("", {"a": one(1), "b": one(2), "c": "late 1\n" + one(3)})
    names = [family.name for family in text_string_to_metric_families(merged)]
    assert len(names) == len(set(names)) == 7


def test_one_scrape():
    async def case():
        a, b = Replica("a"), Replica("b")
        text = one(1)
        a.texts["/metrics"], b.texts["/metrics"] = text.encode(), one(2).encode()
        async with rig(a, b) as made:
            await made.http.post(COMPLETE, json=ask(["one " * 100]))
            b.report = {**b.report, "ready": False}
            await made.ready(a)
            answer = await made.http.get("/metrics")
            assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
            found = samples(answer.text)
            assert labelled(text, a.url).items() <= found.items()
            assert labelled(b.texts["/metrics"].decode(), b.url).items() <= found.items(), "it is not down"
            ready = {dict(labels)["replica"]: value for (name, labels), value in found.items() if name.endswith("way_ready")}
            assert ready == {a.url: 1, b.url: 0}
            assert sum(value for (name, _), value in found.items() if name == "chunkattn_gateway_sent_total") == 1
            assert sum(value for (name, _), value in found.items() if name == "chunkattn_gateway_missing_bytes_total") == 405

    run(case)
