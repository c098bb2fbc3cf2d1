from gregale.data.progress import progress_bars


def test_bars_are_drawn_on_standard_error(capsys):
    with progress_bars() as report:
        report("books", 1, 4)
        report("books", 4, 4)
    output = capsys.readouterr()
    assert "books" in output.err
    assert output.out == ""
