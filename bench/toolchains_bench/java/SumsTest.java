class SumsTest {
    public static void main(String[] arguments) {
        if (Sums.add(2, 3) != 5) {
            throw new AssertionError("2 + 3");
        }
    }
}
