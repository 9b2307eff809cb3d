python3 - <<'PY'
import csv
from decimal import Decimal

people = list(csv.DictReader(open("people.csv", encoding="utf-8", newline="")))
payments = list(csv.DictReader(open("payments.csv", encoding="utf-8", newline="")))
names = {row["id"]: row["name"] for row in people}
totals = {key: [Decimal("0.00"), 0] for key in names}
unknown = []
for row in payments:
    if row["person"] in totals:
        totals[row["person"]][0] += Decimal(row["amount"])
        totals[row["person"]][1] += 1
    else:
        unknown.append(row)
with open("totals.csv", "w", encoding="utf-8", newline="") as file:
    out = csv.writer(file, lineterminator="\n")
    out.writerow(["name", "total", "payments"])
    for key, (total, count) in sorted(totals.items(), key=lambda item: (-item[1][0], names[item[0]])):
        out.writerow([names[key], f"{total:.2f}", count])
with open("unknown.csv", "w", encoding="utf-8", newline="") as file:
    out = csv.DictWriter(file, ["date", "person", "amount"], lineterminator="\n")
    out.writeheader()
    out.writerows(unknown)
PY
