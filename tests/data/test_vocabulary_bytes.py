from tokenizers import pre_tokenizers

from gregale.data.vocabulary_bytes import byte_level_reader, decoder_kinds, vocabulary_bytes


def test_the_byte_level_alphabet_is_the_librarys():
    read = byte_level_reader()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    assert sorted(read(character) for character in alphabet) == [bytes([value]) for value in range(256)]
    for text in ("the cat", "ü\n\t€", "\x00\x7f\xad"):
        ((token, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
        assert read(token) == text.encode()


def test_decoders_inside_a_sequence_are_found():
    nested = {"type": "Sequence", "decoders": [{"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}]}
    assert decoder_kinds(nested) == {"Sequence", "ByteLevel"}
    assert decoder_kinds(None) == set()


def test_ids_that_no_token_has_stand_for_nothing():
    added = [{"id": 5, "content": "<s>", "special": True}, {"id": 6, "content": "ü", "special": False}]
    tokenizer = {"decoder": {"type": "ByteLevel"}, "added_tokens": added}
    vocabulary = {"a": 0, "Ġb": 3, "<s>": 5, "ü": 6}
    assert vocabulary_bytes(tokenizer, vocabulary, "here") == [b"a", b"", b"", b" b", b"", b"", "ü".encode()]
