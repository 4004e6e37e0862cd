"""Page-locking with a driver that refuses part way (C13); expectations are the definition of a
prefix."""

from __future__ import annotations

from strata.memory.mapped import address_table, lock_pages, unlock_pages


class Refusing:
    """Registers until ``room`` bytes are used up; keeps the driver's sticky error like a real one
    would."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.held: dict[int, int] = {}
        self.sticky = False

    def register(self, address: int, n_bytes: int) -> str | None:
        assert n_bytes > 0, "a request for 0 bytes reached the driver"
        if n_bytes > self.room:
            self.sticky = False  # the contract: cleared before returning
            return "out of room"
        self.room -= n_bytes
        self.held[address] = n_bytes
        return None

    def unregister(self, address: int) -> None:
        self.room += self.held.pop(address)

    def device_address(self, address: int) -> int:
        assert any(a <= address < a + n for a, n in self.held.items())
        return address + (1 << 40)


def test_refused_part_way_keeps_a_prefix_and_says_why() -> None:
    driver = Refusing(room=3000)
    locked = lock_pages(driver, 4096, 10_000, piece_bytes=1000)
    assert (locked.n_bytes, locked.why_not_more) == (3000, "out of room")
    assert not driver.sticky
    unlock_pages(driver, locked)
    assert driver.held == {} and driver.room == 3000


def test_nothing_refused_has_no_cap() -> None:
    driver = Refusing(room=1 << 60)
    locked = lock_pages(driver, 0, (7 << 30) + 5)
    assert locked.n_bytes == (7 << 30) + 5 and locked.why_not_more is None
    assert len(locked.pieces) == 8


def test_zero_bytes_is_no_request() -> None:
    locked = lock_pages(Refusing(room=0), 4096, 0)
    assert (locked.n_bytes, locked.pieces, locked.why_not_more) == (0, (), None)


def test_objects_across_the_end_have_no_address() -> None:
    driver = Refusing(room=2500)
    base = 10_000
    locked = lock_pages(driver, base, 4000, piece_bytes=500)
    starts = [base + i * 600 for i in range(6)]
    table = address_table(driver, locked, base, starts, 600)
    assert table == [s + (1 << 40) for s in starts[:4]] + [0, 0]
