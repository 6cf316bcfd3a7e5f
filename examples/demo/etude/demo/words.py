"""The words of the generated repositories: one list per slot, no word in two lists.

Disjoint lists make every slot fillable by its category: "a noun here" is one attention hop to the
only noun in view. A policy of a million parameters learns that in minutes; with one shared list it
learned to write plausible names from other repositories.
"""

PACKAGES = ("shop", "bank", "game", "store", "school", "farm", "hotel", "museum")
MODULES = ("core", "util", "calc", "report", "model", "stats", "data", "tools")
NOUNS = (
    *("price", "score", "point", "order", "item", "ticket", "book", "coin", "seat", "room"),
    *("card", "team", "page", "song", "meal", "star", "user", "photo", "gift", "lamp"),
)
FIRST_PARAMETERS = ("a", "n", "size", "left", "base", "width", "first", "low")
SECOND_PARAMETERS = ("b", "k", "limit", "right", "rate", "height", "second", "high")
LISTS = ("items", "values", "prices", "scores", "points", "orders", "numbers", "rows")
