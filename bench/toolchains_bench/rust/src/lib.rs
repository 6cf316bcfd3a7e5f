pub fn add(a: i32, b: i32) -> i32 {
    a - b
}

#[cfg(test)]
mod tests {
    #[test]
    fn sums() {
        assert_eq!(super::add(2, 3), 5);
    }

    #[test]
    fn dependency() {
        assert_eq!(itoa::Buffer::new().format(7), "7");
    }
}
