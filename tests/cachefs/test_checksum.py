"""The checksum is CRC-64/XZ, and pieces add up to the whole."""

from hypothesis import given
from hypothesis import strategies as st

from gpufeed.cachefs.checksum import CRC64_EMPTY, combine, crc64


def test_the_published_check_value_of_crc_64_xz_comes_out():
    assert crc64(b"123456789") == 0x995DC9BBDF1939FA


def test_no_bytes_give_the_empty_checksum():
    assert crc64(b"") == CRC64_EMPTY


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_going_on_from_a_prefix_gives_the_checksum_of_the_whole(prefix, suffix):
    assert crc64(memoryview(suffix), crc64(prefix)) == crc64(prefix + suffix)


@given(st.lists(st.binary(max_size=200), max_size=6))
def test_pieces_combined_in_order_give_the_checksum_of_the_whole(pieces):
    whole = CRC64_EMPTY
    for piece in pieces:
        whole = combine(whole, crc64(piece), len(piece))
    assert whole == crc64(b"".join(pieces))


def test_a_writable_view_into_a_larger_buffer_is_taken_as_it_is():
    buffer = bytearray(b"xx123456789yy")
    assert crc64(memoryview(buffer)[2:11]) == crc64(b"123456789")
