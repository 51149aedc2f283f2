"""Multiple-choice questions with four answers, for measuring confidence.

General knowledge, easy and hard for a small model. The correct answer is the first; answers are
scored as text after the question, so their order does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Item:
    """A question and its answers, the correct one first."""

    question: str
    answers: tuple[str, ...]


_ITEMS = """
What is the capital of France? | Paris | London | Madrid | Vienna
What is the capital of Japan? | Tokyo | Seoul | Bangkok | Beijing
What is the capital of Egypt? | Cairo | Tunis | Tripoli | Amman
What is the capital of Canada? | Ottawa | Toronto | Montreal | Vancouver
What is the capital of Australia? | Canberra | Sydney | Melbourne | Perth
What is the capital of Brazil? | Brasília | São Paulo | Salvador | Recife
What is the capital of Turkey? | Ankara | Istanbul | Izmir | Antalya
What is the capital of Kenya? | Nairobi | Kampala | Lagos | Accra
Which planet is closest to the Sun? | Mercury | Venus | Mars | Jupiter
Which planet is the largest in the solar system? | Jupiter | Saturn | Neptune | Earth
Which planet is known for its bright rings? | Saturn | Mars | Venus | Mercury
What do we call the star at the center of our solar system? | the Sun | the Moon | Sirius | Polaris
How many legs does a spider have? | eight | six | four | ten
How many legs does an insect have? | six | eight | four | two
How many days are there in a week? | seven | five | ten | twelve
How many months have 31 days? | seven | six | eight | five
How many sides does a hexagon have? | six | five | seven | eight
How many strings does a violin have? | four | five | six | three
What is two plus three? | five | four | six | seven
What is seven times eight? | 56 | 54 | 64 | 48
What is one hundred divided by four? | 25 | 20 | 40 | 50
What is the square root of 81? | nine | eight | seven | six
Which of these numbers is prime? | 17 | 15 | 21 | 27
What is half of ninety? | 45 | 40 | 50 | 35
Which gas do plants take in from the air? | carbon dioxide | oxygen | helium | hydrogen
Which gas do people need to breathe? | oxygen | methane | helium | chlorine
What is the chemical symbol of gold? | Au | Ag | Fe | Pb
What is the chemical symbol of iron? | Fe | Ir | In | Au
What is water made of? | hydrogen and oxygen | carbon and oxygen | iron and sulfur | salt and sugar
At what temperature in Celsius does water freeze? | zero | ten | fifty | one hundred
Which part of a plant takes up water from the soil? | the roots | the leaves | the flowers | the fruit
Which organ pumps blood through the body? | the heart | the liver | the lungs | the stomach
Which organ do people think with? | the brain | the kidney | the spleen | the skin
What do bees make? | honey | milk | silk | wool
What do cows mostly eat? | grass | meat | fish | bark
Which animal is known for changing its color? | the chameleon | the elephant | the penguin | the cow
Which animal is the largest on Earth? | the blue whale | the elephant | the giraffe | the polar bear
Which bird cannot fly? | the ostrich | the eagle | the swallow | the gull
What is a young dog called? | a puppy | a kitten | a calf | a foal
What is a young sheep called? | a lamb | a chick | a cub | a kid
Who wrote Romeo and Juliet? | William Shakespeare | Charles Dickens | Mark Twain | Jane Austen
Who wrote Pride and Prejudice? | Jane Austen | Emily Brontë | Virginia Woolf | Mary Shelley
Who painted the Mona Lisa? | Leonardo da Vinci | Pablo Picasso | Claude Monet | Vincent van Gogh
Who composed the Moonlight Sonata? | Beethoven | Mozart | Vivaldi | Chopin
Who developed the theory of relativity? | Albert Einstein | Isaac Newton | Niels Bohr | Galileo Galilei
Who was the first president of the United States? | George Washington | Abraham Lincoln | John Adams | Thomas Jefferson
In which year did the Second World War end? | 1945 | 1918 | 1939 | 1963
In which year did people first walk on the Moon? | 1969 | 1957 | 1975 | 1981
In which country are the pyramids of Giza? | Egypt | Mexico | Peru | India
In which country is the Eiffel Tower? | France | Italy | Spain | England
Which ocean lies between Europe and America? | the Atlantic | the Pacific | the Indian Ocean | the Arctic
Which river flows through London? | the Thames | the Seine | the Rhine | the Danube
Which continent is the Sahara desert on? | Africa | Asia | Australia | South America
Which language is mostly spoken in Brazil? | Portuguese | Spanish | French | Italian
What is the opposite of hot? | cold | warm | dry | bright
What is the opposite of early? | late | soon | often | quick
Which word means the same as big? | large | small | narrow | quiet
What do you use to cut paper? | scissors | a spoon | a pillow | a rope
What do you open a lock with? | a key | a candle | a hammer | a book
What falls from the sky when it is very cold? | snow | sand | leaves | dust
Which season comes after winter? | spring | summer | autumn | fall
Where does the sun rise? | in the east | in the west | in the north | in the south
What do people wear on their feet? | shoes | gloves | hats | scarves
What is frozen water called? | ice | steam | fog | dew
"""  # noqa: E501 (a line is a question)


def load_items() -> list[Item]:
    """Return all questions, with subjects mixed: the first n are a fair sample."""
    every = []
    for line in _ITEMS.strip().splitlines():
        question, *answers = (cell.strip() for cell in line.split("|"))
        every.append(Item(question, tuple(answers)))
    step = 27  # coprime with their number, so each comes once
    return [every[number * step % len(every)] for number in range(len(every))]
