"""Raw rows as the inputs of an exported model, by the ``model.json`` that ``quorem export`` writes beside the graph.

    rules = read_rules("model.json")
    inputs = encode(rules, csv.DictReader(open("new.csv")))             # or rows of JSON
    onnxruntime.InferenceSession("model.onnx").run(["probabilities"], inputs)

A row is a dict of column -> value. It needs NumPy, but neither torch nor quorem, and is short enough to be rewritten in
another language. Decimal fractions as categories should come as text: languages print them in different ways.
"""

import json
import math

import numpy as np

LARGEST = float(np.finfo(np.float32).max)


def read_rules(path):
    with open(path, encoding="utf-8") as file:
        rules = json.load(file)
    for column in rules["categorical"]:
        tokens = column.pop("vocabulary", [])
        column["ids"] = {token: rules["first_token"] + line for line, token in enumerate(tokens)}
    return rules


def encode(rules, rows, unknown="error"):
    """The inputs of the graph; a value that training never saw is an error, or with ``unknown="missing"`` missing."""
    rows = list(rows)
    dense = np.empty((len(rows), len(rules["dense"])), np.float32)
    for k, column in enumerate(rules["dense"]):
        numbers = [number(rules, column["name"], value_of(row, column["name"])) for row in rows]
        dense[:, k] = transformed(np.array(numbers, np.float64), column)
    bags = [[ids_of(rules, column, row, unknown) for row in rows] for column in rules["categorical"]]
    if not rules["jagged"]:
        return {"dense": dense, "ids": np.array(bags, np.int64).reshape(len(bags), len(rows)).T.copy()}
    bags = [bag for column in bags for bag in column]  # all rows of the first column, then of the next
    offsets = np.cumsum([0, *map(len, bags)], dtype=np.int64)
    return {"dense": dense, "ids": np.array([i for bag in bags for i in bag], np.int64), "offsets": offsets}


def value_of(row, name):
    if name not in row:
        raise ValueError(f"the row has no column {name}")
    return row[name]


def number(rules, name, value):
    if isinstance(value, str):
        value = value.strip(" ")
    if value is None or value in rules["missing"]:
        return rules["missing_number"]
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} ({value!r}) must be a number") from None
    return parsed if math.isfinite(parsed) else rules["missing_number"]


def transformed(numbers, column):
    if column["transform"] == "log":
        return np.log1p(np.maximum(numbers, 0))
    if column["transform"] == "signed_log":
        return np.copysign(np.log1p(np.abs(numbers)), numbers)
    if (np.abs(numbers) > LARGEST).any():
        raise ValueError(f"{column['name']} must be at most {LARGEST:.4g}, as float32")
    return numbers


def ids_of(rules, column, row, unknown):
    """The ids of a row's field: one, or any number in a column of several values a row."""
    value = value_of(row, column["name"])
    if isinstance(value, list):
        if not column["multi"]:
            raise ValueError(f"{column['name']} ({value!r}) must be one value")
        texts = [text_of(rules, each) for each in value]
    else:
        texts = [text_of(rules, value)]
        if column["multi"]:  # a missing field is an empty list
            texts = [] if texts[0] is None else texts[0].split(rules["multi_separator"])
    return [id_of(rules, column, text, unknown) for text in texts]


def text_of(rules, value):
    """A category as text, None if it is missing; 3.0 is 3, since integers with missing values often come as floats."""
    if isinstance(value, float) and value == math.floor(value if math.isfinite(value) else 0) and abs(value) < 2**53:
        value = int(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return None if value is None or value != value or text in rules["missing"] else text


def id_of(rules, column, text, unknown):
    if text is None or text in rules["missing"]:
        return rules["missing_id"]
    if rules["ids"] == "none":  # made-up data, whose values are the ids
        known = int(text) if 0 <= int(text) < column["size"] else None
    else:
        known = column["ids"].get(text)
    if known is not None:
        return known
    if column["unknown"] == "hash":
        return -1 - (xxh64(text.encode()) & (2**31 - 1))
    if column["unknown"] is not None:
        return column["unknown"]
    if unknown == "missing":
        return rules["missing_id"]
    raise ValueError(f"{column['name']} ({text!r}) is not in the vocabulary of the training data")


def signed(x):
    return x - 2**64 if x >= 2**63 else x


def xxh64(data):
    """XXH64 with seed 0; the package xxhash computes the same, faster."""
    p1, p2, p3, p4, p5 = (
        0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5,
    )  # fmt: skip
    mask = 2**64 - 1

    def turn(x, bits):
        return (x << bits | x >> 64 - bits) & mask

    def lane(x, word):
        return turn((x + word * p2) & mask, 31) * p1 & mask

    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data) // 8 * 8, 8)]
    stripes, h = len(data) // 32, p5
    if stripes:
        lanes = [(p1 + p2) & mask, p2, 0, -p1 & mask]
        for k in range(4 * stripes):
            lanes[k % 4] = lane(lanes[k % 4], words[k])
        h = sum(turn(x, bits) for x, bits in zip(lanes, (1, 7, 12, 18), strict=True)) & mask
        for x in lanes:
            h = ((h ^ lane(0, x)) * p1 + p4) & mask
    h = (h + len(data)) & mask
    for word in words[4 * stripes :]:
        h = (turn(h ^ lane(0, word), 27) * p1 + p4) & mask
    rest = data[len(data) // 8 * 8 :]
    if len(rest) >= 4:
        h = (turn(h ^ int.from_bytes(rest[:4], "little") * p1 & mask, 23) * p2 + p3) & mask
        rest = rest[4:]
    for byte in rest:
        h = turn(h ^ byte * p5 & mask, 11) * p1 & mask
    for shift, prime in ((33, p2), (29, p3), (32, 1)):
        h = (h ^ h >> shift) * prime & mask
    return h
