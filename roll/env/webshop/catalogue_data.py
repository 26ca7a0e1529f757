"""The kinds of products that a generated shop sells.

Within a kind, no attribute or option is similar enough to pass for another: a purchase either has the wanted value or it
has not. Sizes and amounts are on the axis `size`, where only equal values match.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of product: its name, as it is searched for, its categories, its possible attributes and options, its usual
    prices in dollars, and its uses."""

    name: str
    category: str
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    prices: tuple[int, int]
    uses: tuple[str, ...]

    @property
    def plural(self) -> bool:
        """Whether its name is plural."""
        return self.name.endswith("s") and not self.name.endswith("ss")


def _list(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


_COLORS = _list("black, white, red, blue, green, yellow, purple, pink, brown, grey, orange, navy, beige")
_METALS = _list("gold, silver, copper, black, white, bronze")
_HAIR = _list("black, brown, blonde, auburn, burgundy, grey")
_WOODS = _list("oak, walnut, white, black, cherry, espresso")
_LETTERS = _list("small, medium, large, x-large, xx-large")
_SHOE = _list("6, 7, 8, 9, 10, 11, 12")
_PACKS = _list("pack of 1, pack of 2, pack of 4, pack of 8")
_OUNCES = _list("4 ounce, 8 ounce, 12 ounce, 16 ounce, 32 ounce")
_FEET = _list("3 ft, 6 ft, 10 ft, 15 ft")

_CARE = _list("cruelty free, paraben free, fragrance free, long lasting, dermatologist tested, plant based, travel sized")
_WEAR = _list(
    "machine washable, quick drying, wrinkle resistant, moisture wicking, slim fit, breathable, hand made, lined"
)
_STEP = _list(
    "non slip, arch supporting, memory foam, water resistant, lightweight, vegan leather, shock absorbing, wide toe"
)
_SOFT = _list(
    "machine washable, fade resistant, hypoallergenic, ultra soft, wrinkle free, double sided, eco friendly, fringed"
)
_WOOD = _list(
    "easy assembly, space saving, scratch resistant, heavy duty, height adjustable, mid century, foldable, eco friendly"
)
_COOK = _list("dishwasher safe, bpa free, non stick, leak proof, rust resistant, heat insulated, stackable, lead free")
_EAT = _list(
    "gluten free, sugar free, non gmo, dairy free, keto friendly, high protein, usda organic, low sodium, resealable"
)
_TECH = _list(
    "fast charging, noise cancelling, water resistant, dust proof, plug and play, hands free, long lasting, ultra slim"
)
_SPORT = _list("non slip, sweat proof, lightweight, quick drying, rip proof, easy carry, odor free, extra thick")
_PET = _list("machine washable, chew resistant, non toxic, non slip, reflective, easy clean, hypoallergenic, hand made")
_DESK = _list(
    "water resistant, acid free, eco friendly, refillable, shatter proof, smooth writing, hand made, pocket sized"
)

_BEAUTY, _CLOTHES, _SHOES = "Beauty & Personal Care", "Clothing", "Shoes"
_HOME, _FURNITURE, _KITCHEN = "Home", "Furniture", "Kitchen"
_GROCERY, _ELECTRONICS, _OUTDOORS, _PETS, _OFFICE = (
    "Grocery",
    "Electronics",
    "Sports & Outdoors",
    "Pet Supplies",
    "Office",
)

KINDS: tuple[Kind, ...] = (
    Kind(
        "clip-in hair extension",
        f"{_BEAUTY} › Hair Care › Extensions",
        _list("natural looking, heat resistant, tangle free, long lasting, double weft, cruelty free, reusable"),
        {"color": _HAIR, "size": _list("12 inch, 16 inch, 20 inch, 24 inch")},
        (9, 70),
        _list("weddings, parties, everyday wear"),
    ),
    Kind(
        "shampoo",
        f"{_BEAUTY} › Hair Care › Washing",
        (*_CARE, "sulfate free"),
        {"scent": _list("coconut, lavender, rosemary, citrus, vanilla"), "size": _OUNCES},
        (6, 35),
        _list("dry scalps, curly hair, daily washing"),
    ),
    Kind(
        "lip balm",
        f"{_BEAUTY} › Skin Care › Lips",
        (*_CARE, "spf protected"),
        {"flavor": _list("cherry, honey, mint, strawberry, vanilla"), "size": _PACKS},
        (4, 22),
        _list("winter days, the beach, chapped lips"),
    ),
    Kind(
        "sunscreen lotion",
        f"{_BEAUTY} › Skin Care › Sun",
        (*_CARE, "water resistant", "oil free"),
        {"protection": _list("spf thirty, spf fifty, spf seventy"), "size": _OUNCES},
        (8, 38),
        _list("the beach, hiking, sensitive faces"),
    ),
    Kind(
        "nail polish",
        f"{_BEAUTY} › Nails › Polish",
        (*_CARE, "quick drying", "chip resistant"),
        {"color": _COLORS, "finish": _list("matte, glossy, glitter, metallic")},
        (4, 24),
        _list("salons, parties, gifts"),
    ),
    Kind(
        "makeup brushes",
        f"{_BEAUTY} › Tools › Brushes",
        (*_CARE, "easy clean", "synthetic hair"),
        {"color": _METALS, "size": _list("set of 5, set of 8, set of 12, set of 18")},
        (8, 55),
        _list("foundation, eye shadow, beginners"),
    ),
    Kind(
        "t-shirt",
        f"{_CLOTHES} › Tops › Shirts",
        (*_WEAR, "tagless"),
        {"color": _COLORS, "size": _LETTERS, "sleeve": _list("short sleeve, long sleeve, sleeveless")},
        (9, 40),
        _list("the gym, weekends, layering"),
    ),
    Kind(
        "hoodie",
        f"{_CLOTHES} › Tops › Sweatshirts",
        (*_WEAR, "fleece inside"),
        {"color": _COLORS, "size": _LETTERS},
        (18, 75),
        _list("cool evenings, school, travel"),
    ),
    Kind(
        "jeans",
        f"{_CLOTHES} › Bottoms › Denim",
        (*_WEAR, "high waist", "stretchy"),
        {"color": _list("black, blue, grey, white, indigo"), "size": _list("28, 30, 32, 34, 36, 38")},
        (22, 95),
        _list("work, weekends, going out"),
    ),
    Kind(
        "summer dress",
        f"{_CLOTHES} › Dresses › Casual",
        (*_WEAR, "high waist", "tie back"),
        {"color": _COLORS, "size": _LETTERS, "pattern": _list("floral, striped, plain, dotted")},
        (18, 85),
        _list("garden parties, holidays, warm days"),
    ),
    Kind(
        "winter coat",
        f"{_CLOTHES} › Outerwear › Coats",
        (*_WEAR, "wind proof", "faux fur"),
        {"color": _COLORS, "size": _LETTERS},
        (45, 190),
        _list("snow, commuting, cold mornings"),
    ),
    Kind(
        "pajama set",
        f"{_CLOTHES} › Sleepwear › Pajamas",
        (*_WEAR, "tagless", "elastic waist"),
        {"color": _COLORS, "size": _LETTERS, "fabric": _list("cotton, satin, flannel, bamboo")},
        (15, 65),
        _list("lounging, cold nights, gifts"),
    ),
    Kind(
        "running shoes",
        f"{_SHOES} › Athletic › Running",
        (*_STEP, "breathable"),
        {"color": _COLORS, "size": _SHOE},
        (30, 140),
        _list("road races, treadmills, long walks"),
    ),
    Kind(
        "hiking boots",
        f"{_SHOES} › Outdoor › Hiking",
        (*_STEP, "insulated", "steel toe"),
        {"color": _COLORS, "size": _SHOE},
        (40, 180),
        _list("mountain trails, mud, camping"),
    ),
    Kind(
        "sandals",
        f"{_SHOES} › Casual › Open",
        (*_STEP, "open toe"),
        {"color": _COLORS, "size": _SHOE},
        (14, 80),
        _list("the pool, summer walks, travel"),
    ),
    Kind(
        "house slippers",
        f"{_SHOES} › Casual › Indoor",
        (*_STEP, "machine washable", "faux fur"),
        {"color": _COLORS, "size": _LETTERS},
        (12, 48),
        _list("cold floors, guests, lazy mornings"),
    ),
    Kind(
        "throw blanket",
        f"{_HOME} › Bedding › Blankets",
        _SOFT,
        {"color": _COLORS, "size": _list("40 x 50 inch, 50 x 60 inch, 60 x 80 inch")},
        (14, 70),
        _list("the sofa, movie nights, picnics"),
    ),
    Kind(
        "duvet cover",
        f"{_HOME} › Bedding › Covers",
        (*_SOFT, "zipper closure"),
        {"color": _COLORS, "size": _list("twin, full, queen, king")},
        (22, 110),
        _list("guest rooms, dorms, warm sleepers"),
    ),
    Kind(
        "pillow cover",
        f"{_HOME} › Decor › Cushions",
        (*_SOFT, "zipper closure"),
        {"color": _COLORS, "size": _list("16 x 16 inch, 18 x 18 inch, 20 x 20 inch")},
        (7, 32),
        _list("the sofa, a reading corner, the porch"),
    ),
    Kind(
        "window curtains",
        f"{_HOME} › Decor › Windows",
        (*_SOFT, "light blocking", "noise reducing"),
        {"color": _COLORS, "size": _list("52 x 63 inch, 52 x 84 inch, 52 x 96 inch")},
        (16, 80),
        _list("bedrooms, nurseries, street sides"),
    ),
    Kind(
        "area rug",
        f"{_HOME} › Decor › Floors",
        (*_SOFT, "non slip", "stain resistant"),
        {"color": _COLORS, "size": _list("2 x 3 ft, 4 x 6 ft, 5 x 7 ft, 8 x 10 ft")},
        (25, 220),
        _list("living rooms, hallways, the bedside"),
    ),
    Kind(
        "shower curtain",
        f"{_HOME} › Bath › Showers",
        (*_SOFT, "mildew resistant", "water repellent"),
        {"color": _COLORS, "pattern": _list("floral, striped, plain, geometric")},
        (10, 45),
        _list("small bathrooms, guests, rentals"),
    ),
    Kind(
        "office chair",
        f"{_FURNITURE} › Office › Seating",
        (*_WOOD, "lumbar supporting", "swivel seat"),
        {"color": _COLORS, "material": _list("mesh, leather, velvet, linen")},
        (70, 320),
        _list("long days, gaming, home offices"),
    ),
    Kind(
        "bookshelf",
        f"{_FURNITURE} › Storage › Shelves",
        (*_WOOD, "wall mounted"),
        {"color": _WOODS, "size": _list("3 tier, 4 tier, 5 tier, 6 tier")},
        (35, 190),
        _list("narrow rooms, plants, paperbacks"),
    ),
    Kind(
        "coffee table",
        f"{_FURNITURE} › Living Room › Tables",
        (*_WOOD, "tempered glass", "lift top"),
        {"color": _WOODS, "shape": _list("round, oval, square, rectangular")},
        (55, 260),
        _list("small flats, board games, guests"),
    ),
    Kind(
        "bar stools",
        f"{_FURNITURE} › Dining › Seating",
        (*_WOOD, "swivel seat", "footrest included"),
        {"color": _COLORS, "size": _list("24 inch, 26 inch, 30 inch")},
        (48, 230),
        _list("kitchen islands, counters, pubs at home"),
    ),
    Kind(
        "nightstand",
        f"{_FURNITURE} › Bedroom › Tables",
        (*_WOOD, "soft close", "usb powered"),
        {"color": _WOODS, "size": _list("1 drawer, 2 drawer, 3 drawer")},
        (35, 150),
        _list("bedrooms, dorms, reading"),
    ),
    Kind(
        "frying pan",
        f"{_KITCHEN} › Cookware › Pans",
        (*_COOK, "oven safe", "induction ready"),
        {"color": _METALS, "size": _list("8 inch, 10 inch, 12 inch")},
        (15, 90),
        _list("eggs, searing, small kitchens"),
    ),
    Kind(
        "water bottle",
        f"{_KITCHEN} › Drinkware › Bottles",
        (*_COOK, "vacuum sealed", "easy carry"),
        {"color": _COLORS, "size": _OUNCES, "lid": _list("straw lid, flip lid, screw lid")},
        (9, 48),
        _list("school, cycling, the office"),
    ),
    Kind(
        "coffee mug",
        f"{_KITCHEN} › Drinkware › Cups",
        (*_COOK, "microwave safe", "hand made"),
        {"color": _COLORS, "size": _OUNCES},
        (7, 32),
        _list("morning coffee, gifts, the desk"),
    ),
    Kind(
        "lunch box",
        f"{_KITCHEN} › Storage › Containers",
        (*_COOK, "microwave safe", "easy clean"),
        {"color": _COLORS, "size": _list("2 compartment, 3 compartment, 5 compartment")},
        (9, 42),
        _list("school, work, picnics"),
    ),
    Kind(
        "knife set",
        f"{_KITCHEN} › Cutlery › Knives",
        _list(
            "dishwasher safe, rust resistant, stainless steel, full tang, hand forged, ergonomic, heavy duty, razor sharp"
        ),
        {"color": _METALS, "size": _list("3 piece, 6 piece, 12 piece, 15 piece")},
        (22, 160),
        _list("beginners, new homes, serious cooks"),
    ),
    Kind(
        "protein bars",
        f"{_GROCERY} › Snacks › Bars",
        _EAT,
        {"flavor": _list("peanut butter, chocolate, vanilla, blueberry, caramel"), "size": _PACKS},
        (8, 48),
        _list("the gym, breakfast, long drives"),
    ),
    Kind(
        "green tea",
        f"{_GROCERY} › Beverages › Tea",
        (*_EAT, "caffeine free"),
        {"flavor": _list("jasmine, lemon, ginger, mint, peach"), "size": _PACKS},
        (5, 36),
        _list("mornings, iced drinks, quiet evenings"),
    ),
    Kind(
        "trail mix",
        f"{_GROCERY} › Snacks › Nuts",
        (*_EAT, "dry roasted"),
        {"flavor": _list("tropical, cranberry, chocolate, spicy"), "size": _OUNCES},
        (6, 34),
        _list("hiking, lunch boxes, road trips"),
    ),
    Kind(
        "hot sauce",
        f"{_GROCERY} › Condiments › Sauces",
        (*_EAT, "small batch"),
        {
            "flavor": _list("habanero, chipotle, garlic, mango, ghost pepper"),
            "size": _list("5 ounce, 10 ounce, 18 ounce"),
        },
        (5, 28),
        _list("tacos, wings, marinades"),
    ),
    Kind(
        "dark chocolate",
        f"{_GROCERY} › Snacks › Candy",
        (*_EAT, "fair trade", "vegan"),
        {"flavor": _list("orange, sea salt, almond, mint, raspberry"), "size": _PACKS},
        (5, 42),
        _list("gifts, baking, after dinner"),
    ),
    Kind(
        "wireless earbuds",
        f"{_ELECTRONICS} › Audio › Headphones",
        (*_TECH, "touch control", "sweat proof"),
        {"color": _COLORS, "charger": _list("usb case, wireless case, solar case")},
        (18, 160),
        _list("running, calls, flights"),
    ),
    Kind(
        "bluetooth speaker",
        f"{_ELECTRONICS} › Audio › Speakers",
        (*_TECH, "stereo sound", "heavy bass"),
        {"color": _COLORS, "size": _list("5 watt, 10 watt, 20 watt, 40 watt")},
        (16, 150),
        _list("the shower, parties, the garden"),
    ),
    Kind(
        "phone case",
        f"{_ELECTRONICS} › Phones › Cases",
        (*_TECH, "drop tested", "scratch resistant"),
        {"color": _COLORS, "size": _list("5.4 inch, 6.1 inch, 6.5 inch, 6.7 inch")},
        (7, 45),
        _list("clumsy hands, travel, work"),
    ),
    Kind(
        "charging cable",
        f"{_ELECTRONICS} › Accessories › Cables",
        (*_TECH, "nylon braided", "gold plated"),
        {"color": _COLORS, "size": _FEET, "plug": _list("usb c, lightning, micro usb")},
        (5, 32),
        _list("the car, the bedside, the office"),
    ),
    Kind(
        "computer mouse",
        f"{_ELECTRONICS} › Accessories › Input",
        (*_TECH, "ergonomic", "silent click"),
        {"color": _COLORS, "connection": _list("bluetooth, usb receiver, wired")},
        (9, 85),
        _list("spreadsheets, gaming, left hands"),
    ),
    Kind(
        "yoga mat",
        f"{_OUTDOORS} › Fitness › Yoga",
        (*_SPORT, "eco friendly"),
        {"color": _COLORS, "size": _list("4 mm, 6 mm, 8 mm, 10 mm")},
        (12, 75),
        _list("studios, stretching, hard floors"),
    ),
    Kind(
        "camping tent",
        f"{_OUTDOORS} › Camping › Shelter",
        _list("wind proof, easy setup, water resistant, uv protected, lightweight, flame retardant, mosquito proof"),
        {"color": _COLORS, "size": _list("2 person, 4 person, 6 person, 8 person")},
        (45, 290),
        _list("families, festivals, rainy weekends"),
    ),
    Kind(
        "cycling gloves",
        f"{_OUTDOORS} › Cycling › Clothing",
        (*_SPORT, "touch screen ready", "gel padded"),
        {"color": _COLORS, "size": _LETTERS},
        (10, 48),
        _list("commuting, mountain bikes, the gym"),
    ),
    Kind(
        "backpack",
        f"{_OUTDOORS} › Camping › Bags",
        (*_SPORT, "water resistant", "anti theft"),
        {"color": _COLORS, "size": _list("20 liter, 30 liter, 40 liter, 60 liter")},
        (20, 130),
        _list("school, day hikes, flights"),
    ),
    Kind(
        "dog bed",
        f"{_PETS} › Dogs › Beds",
        (*_PET, "memory foam", "water proof"),
        {"color": _COLORS, "size": _LETTERS},
        (18, 120),
        _list("old dogs, crates, the living room"),
    ),
    Kind(
        "dog leash",
        f"{_PETS} › Dogs › Walking",
        (*_PET, "shock absorbing", "hands free"),
        {"color": _COLORS, "size": _FEET},
        (8, 45),
        _list("training, night walks, strong pullers"),
    ),
    Kind(
        "cat scratching post",
        f"{_PETS} › Cats › Furniture",
        (*_PET, "easy assembly", "heavy duty"),
        {"color": _COLORS, "size": _list("18 inch, 24 inch, 32 inch")},
        (15, 95),
        _list("kittens, small flats, bored cats"),
    ),
    Kind(
        "notebook",
        f"{_OFFICE} › Paper › Notebooks",
        (*_DESK, "hard cover", "spiral bound"),
        {"color": _COLORS, "ruling": _list("lined, dotted, blank, squared")},
        (5, 32),
        _list("lectures, journals, sketches"),
    ),
    Kind(
        "desk lamp",
        f"{_OFFICE} › Lighting › Lamps",
        _list("energy saving, eye caring, height adjustable, usb powered, touch control, flicker free, foldable"),
        {"color": _METALS, "light": _list("warm light, cool light, daylight")},
        (15, 90),
        _list("late reading, crafts, small desks"),
    ),
    Kind(
        "gel pens",
        f"{_OFFICE} › Writing › Pens",
        (*_DESK, "quick drying", "smudge proof"),
        {"color": _COLORS, "size": _list("set of 6, set of 12, set of 24")},
        (4, 30),
        _list("notes, planners, drawing"),
    ),
)
