"""The public data sets of the papers: description, publisher, and number of examples per class.

Counts are those of the publishers' own train and test splits, so that a partition can be drawn without the data.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field

from fl_core.datasets.augmentation import CIFAR10, CIFAR100, TINY, Augmentation
from fl_core.datasets.image_files import IMAGENET_MEAN, IMAGENET_STD

DIGITS = tuple("0123456789")
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
FASHION_CLASSES = (
    *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
    *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
)
_CIFAR100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle "
    "caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant "
    "flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man "
    "maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree "
    "plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper "
    "snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger tractor train "
    "trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)
CIFAR100_CLASSES = tuple(_CIFAR100.split())
CHARACTERS = tuple("\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}")
"""LEAF's alphabet of Shakespeare, in its order."""


@dataclass(frozen=True, slots=True)
class PublishedDataset:
    """One public data set.

    Attributes:
        classes: in the publisher's order; TinyImageNet's are the positions of its 200 WordNet ids in sorted order
        layout: the files that are expected on disk, below the data root or below a folder of the data set's name
        mean, std: of the papers' normalisation, per channel; empty: none
        train, test: published examples per class; empty where users decide
    """

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    publisher: str
    layout: str
    train: tuple[int, ...] = ()
    test: tuple[int, ...] = ()
    how: Augmentation = field(default_factory=Augmentation)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


PUBLISHED: Mapping[str, PublishedDataset] = {
    "mnist": PublishedDataset(
        (1, 28, 28),
        DIGITS,
        "Y. LeCun, C. Cortes and C. Burges, http://yann.lecun.com/exdb/mnist",
        "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
    ),
    "fmnist": PublishedDataset(
        (1, 28, 28),
        FASHION_CLASSES,
        "Zalando Research, https://github.com/zalandoresearch/fashion-mnist",
        "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte",
        (6000,) * 10,
        (1000,) * 10,
    ),
    "emnist": PublishedDataset(
        (1, 28, 28),
        tuple(string.ascii_lowercase),
        "NIST, https://www.nist.gov/itl/products-and-services/emnist-dataset",
        "EMNIST/raw/emnist-letters-{train,test}-{images-idx3,labels-idx1}-ubyte",
        (4800,) * 26,
        (800,) * 26,
    ),
    "svhn": PublishedDataset(
        (3, 32, 32),
        DIGITS,
        "Y. Netzer et al., Stanford University, http://ufldl.stanford.edu/housenumbers",
        "train_32x32.mat and test_32x32.mat",
        (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
    ),
    "cifar10": PublishedDataset(
        (3, 32, 32),
        CIFAR10_CLASSES,
        "A. Krizhevsky, University of Toronto, https://www.cs.toronto.edu/~kriz/cifar.html",
        "cifar-10-batches-py/ (the Python version), or images as {train,test}/<class>/*.jpg",
        (5000,) * 10,
        (1000,) * 10,
        CIFAR10,
        (0.4914, 0.4822, 0.4465),
        (0.2470, 0.2435, 0.2615),
    ),
    "cifar100": PublishedDataset(
        (3, 32, 32),
        CIFAR100_CLASSES,
        "A. Krizhevsky, University of Toronto, https://www.cs.toronto.edu/~kriz/cifar.html",
        "cifar-100-python/ (the Python version)",
        (500,) * 100,
        (100,) * 100,
        CIFAR100,
        (0.5071, 0.4865, 0.4409),
        (0.2673, 0.2564, 0.2762),
    ),
    "cinic10": PublishedDataset(
        (3, 32, 32),
        CIFAR10_CLASSES,
        "L. Darlow et al., University of Edinburgh, https://datashare.ed.ac.uk/handle/10283/3192",
        "{train,valid,test}/<class>/*.png (CINIC-10/ or the folder itself)",
        (9000,) * 10,
        (9000,) * 10,
        mean=(0.47889522, 0.47227842, 0.43047404),
        std=(0.24205776, 0.23828046, 0.25874835),
    ),
    "tinyimagenet": PublishedDataset(
        (3, 64, 64),
        tuple(f"{k:03d}" for k in range(200)),
        "Stanford CS231n, http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "wnids.txt, train/<wnid>/images/*.JPEG, val/images/*.JPEG and val/val_annotations.txt (tiny-imagenet-200/)",
        (500,) * 200,
        (50,) * 200,
        TINY,
        IMAGENET_MEAN,
        IMAGENET_STD,
    ),
    "femnist": PublishedDataset(
        (1, 28, 28),
        (*string.digits, *string.ascii_uppercase, *string.ascii_lowercase),
        "S. Caldas et al., LEAF, https://leaf.cmu.edu (prepared by its preprocess.sh)",
        "{train,test}/*.json with users, num_samples and user_data (data/ of LEAF's femnist)",
    ),
    "shakespeare": PublishedDataset(
        (80,),
        CHARACTERS,
        "S. Caldas et al., LEAF, https://leaf.cmu.edu (prepared by its preprocess.sh)",
        "{train,test}/*.json with users, num_samples and user_data (data/ of LEAF's shakespeare)",
    ),
}
