"""The vocabulary of the synthetic catalogue: invented brands, real kinds of products, and how people misname them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attribute:
    """A property with its values; `styles` are the ways a value is written (`{}` is the value)."""

    values: tuple[str, ...]
    styles: tuple[str, ...] = ("{}",)


@dataclass(frozen=True)
class Kind:
    """One kind of product. `names[0]` is the usual name, the rest are synonyms; complements are bought with it."""

    names: tuple[str, ...]
    series: tuple[str, ...]
    attributes: tuple[Attribute, ...]
    complements: tuple[str, ...]
    price: float


_STORAGE = Attribute(("64", "128", "256", "512"), ("{}gb", "{} gb", "{} gigabyte"))
_DISK = Attribute(("256", "512", "1024", "2048"), ("{}gb ssd", "{} gb solid state", "{}gb drive"))
_MEMORY = Attribute(("8", "16", "32", "64"), ("{}gb ram", "{} gb memory"))
_SCREEN = Attribute(("24", "27", "32", "43", "55"), ('{}"', "{} inch", "{}in"))
_LAPTOP = Attribute(("13.3", "14", "15.6", "17.3"), ('{}"', "{} inch", "{}in"))
_LITRES = Attribute(("17", "20", "25", "30"), ("{}l", "{} litre", "{} liters"))
_DRUM = Attribute(("6", "7", "8", "9", "10"), ("{}kg", "{} kg", "{} kilo"))
_SPIN = Attribute(("1200", "1400", "1600"), ("{}rpm", "{} rpm", "{} spin"))
_POWER = Attribute(("600", "700", "800", "1000", "1200"), ("{}w", "{} watt", "{} watts"))
_PIXELS = Attribute(("16", "20", "24", "45"), ("{}mp", "{} megapixel", "{} mpix"))
_COLOUR = Attribute(("black", "white", "silver", "blue", "red", "green"))
_SIZE = Attribute(("38", "39", "40", "41", "42", "43", "44"), ("size {}", "eu {}", "sz {}"))
_VOLTS = Attribute(("12", "18", "20", "36"), ("{}v", "{} volt"))
_CUPS = Attribute(("6", "10", "12"), ("{} cup", "{} cups", "{}-cup"))

KINDS: tuple[Kind, ...] = (
    Kind(("smartphone", "mobile phone", "cell phone"), ("nova", "edge", "pixelon", "mira"), (_STORAGE, _COLOUR),
         ("case", "screen protector", "usb c charger"), 480),
    Kind(("laptop", "notebook", "portable computer"), ("swift", "probook", "zen", "airlite"), (_LAPTOP, _MEMORY, _DISK),
         ("sleeve", "docking station", "power adapter"), 900),
    Kind(("television", "tv", "smart tv"), ("vista", "oled one", "crystal"), (_SCREEN, _COLOUR),
         ("wall mount", "remote control", "soundbar stand"), 620),
    Kind(("monitor", "display", "computer screen"), ("ultra", "proart", "sharp"), (_SCREEN, _COLOUR),
         ("monitor arm", "hdmi cable", "screen cleaning kit"), 260),
    Kind(("microwave", "microwave oven"), ("solo", "combi", "quick"), (_LITRES, _POWER, _COLOUR),
         ("turntable plate", "plate cover", "wall bracket"), 110),
    Kind(("washing machine", "washer", "laundry machine"), ("aqua", "eco", "perfect"), (_DRUM, _SPIN, _COLOUR),
         ("drain hose", "stacking kit", "descaler"), 430),
    Kind(("camera", "digital camera", "compact cam"), ("shot", "lumo", "alpha"), (_PIXELS, _COLOUR),
         ("camera bag", "spare battery", "tripod plate"), 540),
    Kind(("running shoes", "trainers", "jogging sneakers"), ("glide", "pace", "cloud"), (_SIZE, _COLOUR),
         ("insoles", "shoe laces", "shoe cleaner"), 95),
    Kind(("cordless drill", "drill driver", "power drill"), ("impact", "core", "max"), (_VOLTS, _COLOUR),
         ("drill bit set", "battery pack", "carry case"), 130),
    Kind(("vacuum cleaner", "hoover", "vac"), ("cyclone", "silent", "turbo"), (_POWER, _COLOUR),
         ("dust bags", "crevice tool", "hepa filter"), 170),
    Kind(("coffee maker", "coffee machine", "filter brewer"), ("aroma", "barista", "morning"), (_CUPS, _POWER, _COLOUR),
         ("paper filters", "glass carafe", "descaling tablets"), 75),
    Kind(("headphones", "headset", "over ear cans"), ("bass", "studio", "quiet"), (_COLOUR,),
         ("ear pads", "audio cable", "headphone stand"), 120),
)  # fmt: skip

BRANDS: tuple[str, ...] = (
    "Acoma", "Belvor", "Cintra", "Dorvak", "Elmaro", "Fenwick", "Gorlan", "Hestia", "Ikaro", "Jovitel",
    "Kastor", "Lumetra", "Mardek", "Norvane", "Ostrava", "Pelion", "Quintel", "Rovanta", "Solvey", "Tremaine",
)  # fmt: skip
FILLERS: tuple[str, ...] = (
    "new",
    "2024 model",
    "official",
    "boxed",
    "free delivery",
    "uk plug",
    "best price",
    "sealed",
)
WISHES: tuple[str, ...] = ("cheap", "best", "buy", "for home", "deal", "good")
