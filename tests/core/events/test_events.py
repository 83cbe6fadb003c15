"""Topics, records, collections, the event service and publish/subscribe."""

# Event interfaces have no abstract methods: topics implement all of them.

from __future__ import annotations

import copy
import pickle
from abc import ABC, abstractmethod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maze.core.events.event_collection import EventCollection
from maze.core.events.event_record import EventRecord
from maze.core.events.event_service import EventService
from maze.core.events.event_topic_factory import event_topic_factory
from maze.core.events.pubsub import Pubsub, Subscriber


class Inventory(ABC):
    def replenished(self):
        """A piece was added."""

    def cut(self, piece, area=1.0, *, valid=True):
        """A piece was cut."""

    def odd(self, first, /, *others, **details):
        """Every kind of parameter there is."""


class Machine(ABC):
    @abstractmethod
    def stopped(self, reason):
        """The machine stopped."""


class BiggerInventory(Inventory):
    def sold(self, price):
        """A piece was sold."""


def fired(interface):
    records = []
    return event_topic_factory(interface, records.append), records


def test_firing_an_event_gives_a_record_with_all_arguments_by_name():
    topic, records = fired(Inventory)
    topic.replenished()
    topic.cut((3, 4))
    topic.cut(piece=(1, 2), area=2.0, valid=False)
    topic.cut((5, 6), 7.0)
    topic.odd(1, 2, 3, colour="red")
    assert [(r.interface_class, r.interface_method, r.attributes) for r in records] == [
        (Inventory, Inventory.replenished, {}),
        (Inventory, Inventory.cut, {"piece": (3, 4), "area": 1.0, "valid": True}),
        (Inventory, Inventory.cut, {"piece": (1, 2), "area": 2.0, "valid": False}),
        (Inventory, Inventory.cut, {"piece": (5, 6), "area": 7.0, "valid": True}),
        (Inventory, Inventory.odd, {"first": 1, "others": (2, 3), "colour": "red"}),
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda topic: topic.cut(), r"Inventory\.cut\(\) missing 1 required positional argument: 'piece'"),
        (lambda topic: topic.cut(1, 2, 3), r"Inventory\.cut\(\) takes from 2 to 3 positional"),
        (lambda topic: topic.cut(1, size=2), r"Inventory\.cut\(\) got an unexpected keyword argument 'size'"),
        (lambda topic: topic.replenished(1), r"Inventory\.replenished\(\) takes 1 positional"),
        (lambda topic: topic.odd(first=1), r"Inventory\.odd\(\)"),
    ],
)
def test_wrong_arguments_are_an_error_that_names_the_event(call, message):
    topic, records = fired(Inventory)
    with pytest.raises(TypeError, match=message):
        call(topic)
    assert not records


def test_an_interface_is_compiled_once_and_its_topics_are_instances_of_it():
    first, _ = fired(Machine)
    second, _ = fired(Machine)
    assert type(first) is type(second)
    assert isinstance(first, Machine)


def test_inherited_events_keep_the_method_that_declares_them():
    topic, records = fired(BiggerInventory)
    topic.replenished()
    topic.sold(3)
    assert [record.interface_method for record in records] == [Inventory.replenished, BiggerInventory.sold]
    assert all(record.interface_class is BiggerInventory for record in records)


def test_an_event_without_self_is_refused_by_name():
    class Broken(ABC):
        def event():
            pass

    with pytest.raises(TypeError, match=r"Broken\.event has no `self`"):
        event_topic_factory(Broken, print)


METHODS = [Inventory.replenished, Inventory.cut, Machine.stopped]


@given(
    kinds=st.lists(st.sampled_from(METHODS)),
    later=st.lists(st.sampled_from(METHODS)),
    query=st.lists(st.sampled_from(METHODS), max_size=3),
)
def test_a_query_finds_exactly_what_a_scan_finds_also_after_appending(kinds, later, query):
    records = [EventRecord(Inventory, kind, {"n": n}) for n, kind in enumerate(kinds)]
    collection = EventCollection(records)
    collection.query_events(Inventory.cut)  # builds the index
    added = [EventRecord(Inventory, kind, {}) for kind in later]
    collection.extend(added)
    everything = records + added
    assert collection.query_events(query) == [r for r in everything if r.interface_method in query]
    for kind in METHODS:
        assert collection.query_events(kind) == [r for r in everything if r.interface_method is kind]
    assert list(collection) == everything


def test_a_pickled_collection_holds_the_same_events_and_answers_queries():
    collection = EventCollection([EventRecord(Machine, Machine.stopped, {"reason": "night"})])
    collection.query_events(Machine.stopped)
    restored = pickle.loads(pickle.dumps(collection))
    assert [record.attributes for record in restored.query_events(Machine.stopped)] == [{"reason": "night"}]


class Counter(Subscriber):
    def __init__(self, *interfaces):
        super().__init__()
        self.interfaces = list(interfaces)

    def get_interfaces(self):
        return self.interfaces


def test_subscribers_get_the_events_of_their_interfaces_in_any_order_of_registration():
    pubsub = Pubsub(EventService())
    early = Counter(Inventory)
    pubsub.register_subscriber(early)
    inventory, machine = pubsub.create_event_topic(Inventory), pubsub.create_event_topic(Machine)
    late = Counter(Inventory, Machine)
    pubsub.register_subscriber(late)
    pubsub.register_subscriber(late)  # twice is once
    inventory.cut(1)
    machine.stopped("night")
    assert len(early.query_events(Inventory.cut)) == 1
    assert not early.query_events(Machine.stopped)
    assert [r.attributes for r in late.query_events([Inventory.cut, Machine.stopped])] == [
        {"piece": 1, "area": 1.0, "valid": True},
        {"reason": "night"},
    ]


def test_clearing_drops_the_events_of_the_service_and_of_all_subscribers():
    service = EventService()
    pubsub = Pubsub(service)
    subscriber = Counter(Machine)
    pubsub.register_subscriber(subscriber)
    topic = pubsub.create_event_topic(Machine)
    topic.stopped("a")
    assert [r.attributes["reason"] for r in service.iterate_event_records()] == ["a"]
    service.clear_events()
    assert not list(service.iterate_event_records())
    assert not subscriber.query_events(Machine.stopped)
    topic.stopped("b")
    assert [r.attributes["reason"] for r in subscriber.query_events(Machine.stopped)] == ["b"]


def test_two_brokers_of_one_service_do_not_get_each_others_events_unless_they_share_the_interface():
    service = EventService()
    first, second = Pubsub(service), Pubsub(service)
    subscriber = Counter(Inventory, Machine)
    second.register_subscriber(subscriber)
    first.create_event_topic(Inventory).cut(1)
    second.create_event_topic(Machine).stopped("x")
    assert not subscriber.query_events(Inventory.cut)
    assert len(subscriber.query_events(Machine.stopped)) == 1
    assert len(service.records) == 2


def test_requesting_a_topic_twice_returns_the_same_topic_and_notifies_once():
    service = EventService()
    pubsub = Pubsub(service)
    subscriber = Counter(Machine)
    pubsub.register_subscriber(subscriber)
    assert pubsub.create_event_topic(Machine) is pubsub.create_event_topic(Machine)
    pubsub.create_event_topic(Machine).stopped("x")
    assert len(subscriber.events) == 1


def test_after_clearing_pubsub_old_topics_still_record_but_are_not_routed():
    service = EventService()
    pubsub = Pubsub(service)
    subscriber = Counter(Machine)
    pubsub.register_subscriber(subscriber)
    topic = pubsub.create_event_topic(Machine)
    service.clear_pubsub()
    topic.stopped("x")
    assert len(service.records) == 1
    assert not len(subscriber.events)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda parts: pickle.loads(pickle.dumps(parts))])
def test_a_copied_environment_fires_into_its_own_service_and_has_no_foreign_listeners(copied):
    service = EventService()
    seen = []
    service.on_clear.append(seen.append)
    pubsub = Pubsub(service)
    subscriber = Counter(Machine)
    pubsub.register_subscriber(subscriber)
    parts = {"service": service, "topic": pubsub.create_event_topic(Machine), "subscriber": subscriber}
    copies = copied(parts)
    copies["topic"].stopped("x")
    assert len(copies["service"].records) == len(copies["subscriber"].events) == 1
    assert len(service.records) == len(subscriber.events) == 0
    copies["service"].clear_events()
    assert not seen


def test_arguments_are_attributes_of_the_record_and_of_its_copies():
    topic, records = fired(Inventory)
    topic.cut((3, 4), 2.0)
    (record,) = records
    for same in (record, copy.copy(record), copy.deepcopy(record), pickle.loads(pickle.dumps(record))):
        assert (same.piece, same.area, same.valid) == ((3, 4), 2.0, True)
        assert same.attributes["piece"] == same.piece
        with pytest.raises(AttributeError, match=r"Inventory\.cut has no argument `aera`. Known: piece, area"):
            _ = same.aera
        assert not hasattr(same, "__array__")
