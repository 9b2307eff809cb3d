"""Two tables that belong together."""


def text(name):
    with open(name, "rb") as file:
        return file.read().decode("utf-8")


def test_totals():
    assert text("totals.csv") == (
        'name,total,payments\nAda Lovelace,30.30,2\nŁukasiewicz,30.30,1\n"Hopper, Grace",0.00,2\nNoether,0.00,0\n'
    )


def test_unknown():
    assert text("unknown.csv") == "date,person,amount\n2024-01-03,9,5.00\n"
