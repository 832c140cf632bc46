"""Makes the database: the same one each time."""

import sqlite3

REGIONS = ("north", "south", "east", "west", "middle")
base = sqlite3.connect("/app/sales.db")
base.execute("CREATE TABLE customers (id INTEGER PRIMARY KEY, name TEXT, region TEXT)")
base.execute(
    "CREATE TABLE orders (id INTEGER PRIMARY KEY, customer INTEGER, year INTEGER, amount INTEGER, cancelled INTEGER)"
)
for number in range(40):
    base.execute("INSERT INTO customers VALUES (?, ?, ?)", (number, f"customer {number}", REGIONS[number % 5]))
base.execute("INSERT INTO customers VALUES (40, 'nobody', 'far')")
for number in range(600):
    row = (number, number * 7 % 40, 2023 + number % 3, 10 + number * 13 % 90, int(number % 11 == 0))
    base.execute("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", row)
base.commit()
